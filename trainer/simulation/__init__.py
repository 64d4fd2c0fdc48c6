"""`sqlenv simulate`: rollouts rehearsed without a model, to size a deployment before renting it."""
