"""torch.ops.normforge, what a traced call becomes, with gradients; importing it registers them.

Stands on families/, calls/, kernels/, selection/, codegen/ and upstream/.
"""

from . import registered as registered
