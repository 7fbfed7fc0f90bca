"""Whole models timed: a training step and a decode step, with torch's norms, with normforge's and with Liger's."""
