"""One file per command: its options, the function it calls, and how its result is shown. Nothing here imports torch."""
