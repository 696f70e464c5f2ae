"""What each verb of the command line does; `spmd.cli` chooses among them."""
