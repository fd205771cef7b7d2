"""`dear-tune demo`: a training run, tuned live, from start to end on one machine."""

from dear_engine.demo.command import demo

__all__ = ["demo"]
