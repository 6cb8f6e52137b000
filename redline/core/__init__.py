"""The nouns every other folder speaks in: workload, plan, recipe, hardware, job, measurement. Standard library only."""
