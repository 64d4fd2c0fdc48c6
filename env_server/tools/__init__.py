"""`sqlenv data`: examine a data set, fix a copy of it, propose questions, export and fetch."""
