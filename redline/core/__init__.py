"""The types that every other folder uses: workload, plan, recipe, hardware, job, measurement. Standard library only."""
