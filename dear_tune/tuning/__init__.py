"""The tuning method: pure functions from a study's history to the next trial and the recommendation."""
