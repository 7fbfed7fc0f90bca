"""Aliases for the modules that older pickles name: `normforge.nn.modules`, say."""

import sys
from importlib import import_module

_HOMES = {
    "functional": "plain_functions",
    "gated_modules": "gated.functions",
    "gating": "gated.functions",
    "grouping": "group.functions",
    "modulation": "functional",
    "modules": "plain_modules",
    "replaced": "replaced",
}
# `import normforge.nn.modules` imports this module first, and then looks in sys.modules again.
for _name, _home in _HOMES.items():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = import_module(f".families.{_home}", __package__)
