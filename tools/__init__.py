"""The developers' commands behind `normforge VERB`, and what they share.

Stands on ahead_of_time/, families/, calls/, codegen/, kernels/, override/, reference/, selection/ and upstream/.
"""
