"""From text to batches on the device: text -> tokenizer -> tokens (a file) -> batches. Only `batches` imports torch."""
