"""One file per command: the words it takes, the verb it calls, how its result is shown. Nothing here imports torch."""
