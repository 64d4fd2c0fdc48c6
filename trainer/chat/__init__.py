"""What the policy reads and what is read out of its replies."""
