"""Which instance serves a mode and a row length. Stands on codegen/ and upstream/."""
