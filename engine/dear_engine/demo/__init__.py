"""`dear-tune demo`: a training run, tuned live, from start to end on one machine."""

__all__: list[str] = []
