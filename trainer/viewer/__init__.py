"""`sqlenv view`: runs and evaluations in a browser, while they are written and afterwards."""
