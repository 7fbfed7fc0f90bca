"""Both suites on several releases of Python and Triton, and the table of what was seen: `python -m proving matrix`.

All but `every.py` runs before there is an environment, and imports nothing that Python does not bring.
"""
