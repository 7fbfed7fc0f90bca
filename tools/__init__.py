"""The developers' commands behind `normforge VERB`, and what they share.

Stands on ahead_of_time/, calls/, codegen/, kernels/, override/, reference/ and selection/.
"""
