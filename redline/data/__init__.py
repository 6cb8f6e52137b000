"""From text to batches on the device: text -> tokenizer -> tokens (a file or shards) -> batches.

Only `batches`, `loader`, `made`, `share` and `stream` import torch.
"""
