"""The road that every call takes: looked up, checked, planned, launched, recorded or traced.

1. A public function hands its arguments to a look-up of `native`, which walks a table of rows, in Python or in
   `upstream/native.c`. The guards of `plan` compare tensors with those of calls that were checked before.
2. `first` takes an unknown call of a 2d function, and `road` one of the functional API, whose rows `row_layout` has
   copied where no kernel can walk them. A copy is looked up again.
3. `check` checks the arguments by the rows in `functions`, and outputs by `row_layout`. `randomness` settles dropouts.
4. `plan` finds the kernels and remembers the plan. `row_gradients` does so for a backward pass in parts.
5. `launch` allocates the outputs of `outputs` and launches.
6. `record` has autograd record the launch, or `traced` calls an operator in its place. `backend` and `attempt` leave
   calls to other functions, and `sharded` hands on the parts of DTensors.

Stands on codegen/, kernels/, selection/ and upstream/.
"""
