"""`spmd script`."""
def run_script(arguments: list[str]) -> int:
    return 0
