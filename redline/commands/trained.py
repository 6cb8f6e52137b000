"""`redline sample` and `redline export`, which take a trained model: a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from redline.commands.common import add_common
from redline.core.errors import EXIT_DONE


def add_sample(commands: Any) -> None:
    sample = commands.add_parser(
        "sample",
        help="generate text with a trained model",
        description="Text from the newest checkpoint of a training run.",
    )
    add_checkpoint(sample)
    sample.add_argument("--prompt", metavar="TEXT", default="", help="what to continue (default: a new document)")
    sample.add_argument("--tokens", metavar="N", type=int, default=200, help="most tokens to generate (default: 200)")
    sample.add_argument("--temperature", metavar="T", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    sample.add_argument("--top-k", metavar="K", type=int, help="sample from the K most likely tokens only")
    sample.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, another text (default: 0)")
    add_common(sample)
    sample.set_defaults(run=run_sample)


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="a trained model as a Hugging Face folder",
        description="Write a checkpoint as config.json and model.safetensors, the vocabulary unpadded.",
    )
    add_checkpoint(export)
    export.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a folder that does not exist yet")
    add_common(export)
    export.set_defaults(run=run_export)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="DIR", type=Path, help="a training run, one of its checkpoints, or a Hugging Face folder"
    )


def run_sample(options: argparse.Namespace) -> int:
    from redline.data.tokenizer import tokenizer
    from redline.engine.sample import sample
    from redline.engine.session import load_model

    adapter, model = load_model(options.checkpoint)
    encoder = tokenizer(adapter.workload.tokenizer)
    prompt = [encoder.end_of_text, *encoder.encode(options.prompt).tolist()]
    ids = sample(
        model,
        prompt,
        shape=adapter.workload.decoder,
        count=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        end_of_text=encoder.end_of_text,
        known=encoder.vocab,
    )
    text = encoder.decode(ids)
    print(
        json.dumps({"prompt": options.prompt, "text": text, "tokens": ids}) if options.json else options.prompt + text
    )
    return EXIT_DONE


def run_export(options: argparse.Namespace) -> int:
    from redline.data.tokenizer import tokenizer
    from redline.engine.export import export_huggingface
    from redline.engine.session import load_model

    adapter, model = load_model(options.checkpoint)
    name = adapter.workload.tokenizer
    export_huggingface(model, options.out, end_of_text=tokenizer(name).end_of_text)
    print(json.dumps({"out": str(options.out), "tokenizer": name}) if options.json else f"wrote {options.out}")
    return EXIT_DONE
