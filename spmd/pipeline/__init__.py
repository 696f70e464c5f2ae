"""Pipeline parallelism: schedules, tick tables, and the program that executes them."""
