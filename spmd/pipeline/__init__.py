"""Pipeline parallelism: schedules, tick tables, and their execution."""
