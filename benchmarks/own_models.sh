#!/usr/bin/env bash
# A model that is not built in, from its config to a record: the ladder, a tune that begins with what the ladder
# measured, and the winner beside transformers' defaults (benchmarks/huggingface.py).
#
#   benchmarks/own_models.sh records/shapes/llama-160m.json runs/llama-160m 16 16,32,64
#   benchmarks/own_models.sh records/shapes/qwen-0.5b.json  runs/qwen-0.5b   8  8,16,32
#
# Arguments: CONFIG, a folder for the results, the micro batch of the ladder, and the micro batches with which both
# sides of the comparison begin. The tune searches for its own micro batch. RUNGS names the ladder's rungs and CHOICES
# the tune's (default: RUNGS); without them each command takes what applies. Finished parts in the folder are kept and
# interrupted ones continue: call it again with the same arguments.
# ladder.json, tune.json and benchmark.json are the records; seconds.txt says how long each part took.
set -euo pipefail

config=$1 out=$2 micro_batch=$3 sizes=$4
python=${PYTHON:-python}
rungs=(${RUNGS:+--rungs "$RUNGS"}) choices=${CHOICES:-${RUNGS:-}}
choices=(${choices:+--rungs "$choices"})
minutes=${MINUTES:-3}          # of tuning, on top of what the ladder measured
ahead=${AHEAD:-5}              # rows that compile at the same time
steps=${STEPS:-20} check_steps=${CHECK_STEPS:-10} rounds=${ROUNDS:-5}
device=(${DEVICE:+--device "$DEVICE"})
mkdir -p "$out"

# part NAME COMMAND...: keep its document as NAME.json once it is whole. Exit code 1 has one too, which says what failed.
part() {
    local name=$1 started=$SECONDS code=0
    shift
    if [ -s "$out/$name.json" ]; then
        echo "$name: finished before" >&2
        return
    fi
    "$@" >"$out/$name.draft" || code=$?
    echo "$name $((SECONDS - started)) s, exit code $code" | tee -a "$out/seconds.txt" >&2
    [ "$code" -le 1 ] || exit "$code"
    mv "$out/$name.draft" "$out/$name.json"
}

# measure NAME WORDS...: run `redline NAME WORDS`, or resume the run that was begun.
measure() {
    local name=$1
    shift
    if [ -e "$out/$name/run.json" ]; then
        part "$name" "$python" -m redline "$name" --resume "$out/$name" --json
    else
        part "$name" "$python" -m redline "$name" "$config" --out "$out/$name" "${device[@]}" --json "$@"
    fi
}

measure ladder --micro-batch "$micro_batch" "${rungs[@]}" --steps "$steps" --check-steps "$check_steps" --compile-ahead "$ahead"
measure tune "${choices[@]}" --after "$out/ladder" --minutes "$minutes"
part benchmark "$python" "$(dirname "$0")/huggingface.py" "$config" --recipe "$out/tune/best.json" \
    --micro-batches "$sizes" --ours "$sizes" --rounds "$rounds" --out "$out/benchmark.partial.json" "${device[@]}"
"$python" -c 'import json, sys; print("ours over theirs:", json.load(open(sys.argv[1]))["ratio"])' "$out/benchmark.json"
