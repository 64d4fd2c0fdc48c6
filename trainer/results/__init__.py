"""What a run measures and keeps: its folder, its metrics, and how sure its figures are."""
