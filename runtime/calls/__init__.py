"""A call: checked, planned, launched, recorded or traced. Stands on kernels/, selection/ and upstream/."""
