"""Random calls for minutes or hours, while memory must not grow."""
