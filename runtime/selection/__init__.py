"""The choice of the instance that serves a mode and a row length. Stands on codegen/ and upstream/."""
