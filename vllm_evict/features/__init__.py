"""A folder for each feature: what it tells its workers, its half of the scheduler, its half of workers."""
