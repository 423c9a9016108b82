"""Files of `episodes/`: one per step, compressed when the step has ended."""
