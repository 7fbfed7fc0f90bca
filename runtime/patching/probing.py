"""Find the formula that an RMSNorm class of Hugging Face's models computes.

Such a class is recognised by its attributes (a 1-D `weight`, `variance_epsilon` or `eps`) and its one input. Classes
with the same attributes compute different formulas: Gemma's adds 1 to the weight, Olmo2's rounds after the weight, T5's
rounds to the weight's dtype. A class's formula is identified by running a copy on random inputs, in training and in
evaluation.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from numbers import Real
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from .function_state import Reads
from .huggingface import ACTIVATIONS, CastOrder
from .report import LeftAloneError


@dataclass(frozen=True)
class Formula:
    """The formula of a module, and the names that its forward reads.

    Attributes:
        order: when it rounds; `CastOrder.AFTER_WEIGHT` where it has no weight.
        activation: of the gate that its result is multiplied by, "silu" or "sigmoid"; "" if there is no gate.
        gates_first: whether its input is multiplied by the activated gate instead.
        epsilon_name: the attribute that its forward reads epsilon from.
        input_names: its forward's parameters.
    """

    order: CastOrder
    activation: str
    gates_first: bool
    epsilon_name: str
    input_names: tuple[str, ...]


# The first fields of a formula.
_Rule = tuple[CastOrder, str, bool]
# Attributes of gated norms that our module reads too.
_OF_GATES = ("activation", "group_size")
_GATED_ORDERS = (CastOrder.AFTER_WEIGHT, CastOrder.TO_INPUT_BEFORE_WEIGHT)


_Result = TypeVar("_Result")

_FORMULA = "weight * x / sqrt(mean(x**2) + eps)"


def calls_only(module: torch.nn.Module, base: Any) -> bool:
    """Return True if a module's forward is its base class's: one call of torch's function on its parameters.

    A twin without hooks is tried in training and in evaluation, in fp32 and bf16, with autocast and without.

    Raises:
        LeftAloneError: it is, and the forward reads values that may change. Flags and words of the module, by
            which its constructor chooses a way to compute, are taken as they are.
    """
    reads = Reads(*type(module).__mro__)
    calls_alike = partial(_calls_alike, module, base)

    def is_alike() -> bool:
        check_class(type(module))
        if len(inspect.signature(module.forward).parameters) != 1:
            return False
        with apart():
            if not all(calls_alike(reads, dtype, mode) for dtype, mode in product(_TYPES, _MODES)):
                return False
            for name, value in _attributes_of(module, _KEPT | {*base.__constants__}):
                unreadable = partial(calls_alike, Reads(), torch.float32, _MODES[1] | {name: _UNREADABLE})
                if not (isinstance(value, (bool, str)) or attempt(unreadable, False)):
                    reads.names.add(name)
        return True

    if not attempt(is_alike, False):
        return False
    _refuse_reads(reads.names)
    return True


def attempt(run: Callable[[], _Result], failed: _Result) -> _Result:
    """Return the result of a trial of a model's code, or `failed` if the code raises."""
    try:
        return run()
    except Exception:  # A model's code may raise anything.
        return failed


def _refuse_reads(names: Iterable[str]) -> None:
    """Refuse a forward that reads values which may change, by their names."""
    if names:
        raise LeftAloneError(f"its forward reads {', '.join(sorted(names))}, and ours would not see that change")


_TYPES = (torch.float32, torch.bfloat16)


def _calls_alike(module: torch.nn.Module, base: Any, reads: Reads, dtype: torch.dtype, state: dict[str, Any]) -> bool:
    twin = _twin(module, _ones(module._parameters, dtype), state)
    sizes = (2, twin.num_channels, 3) if isinstance(module, torch.nn.GroupNorm) else (2, 3, *twin.normalized_shape)
    # Numbers that a cast to fewer bits rounds.
    x = torch.ones(sizes, dtype=dtype).cumsum(-1).sin()
    upcasts = base is torch.nn.LayerNorm
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            one, other = (forward(twin, x) for forward in (type(twin).forward, base.forward))
            with _Calls(upcasts) as own, reads:
                returned = type(twin).forward(twin, x)
            with _Calls(upcasts) as expected:
                base.forward(twin, x)
        # This raises where the dtypes differ.
        is_alike = torch.allclose(one, other, atol=8 * torch.finfo(dtype).eps) and returned is own.result
        if not is_alike or len(own.calls) != 1 or own.calls != expected.calls:
            return False
    return True


class _Calls(TorchFunctionMode):
    """A record of torch's functions that are called, and of their arguments; tensors go by their identity.

    Args:
        upcasts: whether casts return the tensor that they take, and are not recorded.
    """

    def __init__(self, upcasts: bool) -> None:
        super().__init__()
        self._casts = _CASTS if upcasts else ()
        self.calls: list[tuple[Any, list[Any]]] = []
        self.result: Any = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self._casts:
            return args[0].dtype if function == _DTYPE.__get__ else args[0]
        every = [*args, *(kwargs[name] for name in sorted(kwargs))]
        self.calls.append((function, [id(each) if isinstance(each, torch.Tensor) else each for each in every]))
        self.result = function(*args, **kwargs)
        return self.result


_DTYPE: Any = torch.Tensor.dtype
_CASTS = (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type_as, _DTYPE.__get__)


def ignores_scale(module: torch.nn.Module) -> bool | None:
    """Return True if a module's results for x and 64 * x are equal, as a norm's are; None if it cannot be tried.

    A copy of the module is tried on the CPU. A module whose parameters are matrices is no norm.
    """
    shapes = [tuple(each.shape) for each in module.parameters() if not torch.nn.parameter.is_lazy(each)]
    sizes = {math.prod(shape) for shape in shapes}
    if len(sizes) > 1 or any(max(shape, default=1) != math.prod(shape) for shape in shapes):
        return False
    n = next(iter(sizes), 64)
    # Channels last, second, or first.
    inputs = ((2, 3, n), (2, n, 3), (2, n, 3, 5), (2, n, 3, 5, 4))
    with apart(), torch.no_grad():
        tried = [attempt(partial(_ignores_scale_of, module, shape), None) for shape in inputs]
    return None if tried.count(None) == len(tried) else True in tried


def _ignores_scale_of(module: torch.nn.Module, shape: tuple[int, ...]) -> bool | None:
    """Return True if results for inputs of a shape ignore their scale; None if the result is another shape or zeros."""
    x = torch.linspace(100, 1000, math.prod(shape), dtype=torch.float32).sin().reshape(shape) * 100
    one, other = (type(module).forward(_twin(module, _ones(module._parameters), {}), each) for each in (x, 64 * x))
    if not isinstance(one, torch.Tensor) or one.shape != x.shape or torch.equal(one, one * 0):
        return None
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3)


def _twin(module: torch.nn.Module, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return a copy of a module for a trial on the CPU; no constructor runs.

    Args:
        module: the module.
        parameters: the parameters of the copy.
        attributes: values that the copy has in place of the module's.
    """
    held = vars(module) | attributes | {"_parameters": parameters}
    twin = object.__new__(type(module))
    vars(twin).update({name: _unshared(value) for name, value in held.items()}, _buffers=_ones(module._buffers))
    return twin


def _ones(tensors: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor | None]:
    """Return ones on the CPU in the shapes of a module's tensors."""
    return {
        name: None if each is None else torch.nn.Parameter(torch.ones(tuple(each.shape), dtype=dtype))
        for name, each in tensors.items()
    }


def _unshared(value: Any) -> Any:
    """Return a copy of a value that a forward might change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def formula_of(module: torch.nn.Module) -> Formula:
    """Identify the formula that a module's forward computes.

    The module is neither called nor changed, and no hook runs: copies with random weights are called on the CPU. The
    caller's default device, autocast, gradient mode and random numbers have no effect.

    Raises:
        LeftAloneError: the forward computes another formula, or has side effects.
    """
    eps = epsilons_of(module)
    _check_build(module, eps)
    check_class(type(module))
    try:
        with apart():
            return _try(_Trial(module), eps)
    except LeftAloneError:
        raise
    except Exception as error:  # A model's forward may raise anything.
        raise LeftAloneError(
            f"its forward could not be tried on a CPU tensor ({type(error).__name__}: {error})"
        ) from error


def _check_build(module: torch.nn.Module, eps: dict[str, float]) -> None:
    """Refuse a module that holds more than a weight and an epsilon, or less."""
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    if weight is not None and torch.nn.parameter.is_lazy(weight):
        raise LeftAloneError("its weight has no shape yet; patch once the model has run")
    is_vector = weight is None or weight.dim() == 1
    if not is_vector or parameters or getattr(module, "bias", None) is not None or not eps:
        raise LeftAloneError("it lacks a 1-D weight as its only parameter, or a number under variance_epsilon or eps")
    for what, contents in (("buffers", module.named_buffers()), ("modules", module.named_children())):
        if names := [name for name, _ in contents]:
            raise LeftAloneError(f"it holds {what} ({', '.join(names)}), which ours would neither read nor change")


def epsilons_of(module: torch.nn.Module) -> dict[str, float]:
    """Return the attributes of a module that may be its epsilon; refuse a number that kernels do not take.

    Scalars of NumPy's are numbers to torch too, and so are tensors of no dimensions.
    """
    eps = {}
    for name in ("variance_epsilon", "eps"):
        value: Any = vars(module).get(name)
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
        if isinstance(value, Real) or is_scalar:
            if isinstance(value, bool) or not bool(0 <= value < float("inf")):
                raise LeftAloneError(f"its {name} is {value}, and kernels take a finite number of at least 0")
            eps[name] = float(value)
    return eps


# Attributes of torch.nn.Module that a class may override and still be replaced.
_REPLACEABLE = {"__init__", "forward", "extra_repr", "__repr__", "_get_name", "__annotate__", "__annotate_func__"}
_SPECIAL = {name for name, value in vars(torch.nn.Module).items() if callable(value)} - _REPLACEABLE


def check_class(cls: type[torch.nn.Module]) -> None:
    """Refuse a class that overrides more than its forward: a wrapper for FSDP, say, or a class with a __call__."""
    if mixed := mixed_in(cls):
        raise LeftAloneError(f"{cls.__name__} is also a {mixed}, which ours would not be")
    if special := sorted(_SPECIAL.intersection(name for base in _own(cls) for name in vars(base))):
        raise LeftAloneError(f"{cls.__name__} has its own {', '.join(special)}, which ours would not have")


def _own(cls: type[torch.nn.Module]) -> tuple[type, ...]:
    """Return a class and what it is derived from before torch.nn.Module."""
    return cls.__mro__[: cls.__mro__.index(torch.nn.Module)]


def mixed_in(cls: type[torch.nn.Module]) -> str:
    """Return the names of the classes that a class is derived from and that are no modules, with "and a" between."""
    return " and a ".join(base.__name__ for base in _own(cls) if not issubclass(base, torch.nn.Module))


def _inputs_of(module: torch.nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a module's forward: its input, and a gate if it is called so."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_gated = [each.name for each in parameters[1:]] == ["gate"]
    if not (len(parameters) == 1 or is_gated) or any(each.kind not in named for each in parameters):
        raise LeftAloneError(f"its forward takes ({', '.join(map(str, parameters))}), and ours a tensor, or a gate too")
    return parameters


@contextmanager
def apart() -> Iterator[None]:
    """Try modules on the CPU within a context that hides the caller's device, modes and random numbers."""
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=()),
        # A forward that torch.compile decorates would be compiled for each type, mode and epsilon, 9 times in all.
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
    ):
        yield


# Makes a random tensor of a size.
Draw = Callable[..., torch.Tensor]
_FUNCTION_TYPES = ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2))


def recognised(formulas: Callable[[], Iterable[Any]], function: Any, *how: Any) -> Any:
    """Return the formula that a function computes, identified by calling the function on random operands.

    Args:
        formulas: makes objects with a method `trials(function, draw, *how)`, which yields what the function returns for
            tensors that `draw` makes, each with what the formula gives.
        function: anything; only functions of Python's are tried.
        how: how the function is called.

    Returns:
        The first formula that fits; None if none does, or if the function reads what may change unseen.
    """
    if function.__class__ is not FunctionType:
        return None
    reads, formula = _tried(function, formulas, *how)
    if not (reads.names or reads.still()):
        _tried.cache_clear()
        _, formula = _tried(function, formulas, *how)
    return formula


def called(function: Any, x: Any, operands: Sequence[Any], positional: int, named: Any, constants: Any) -> Any:
    """Call a function of rows and operands as a forward does.

    Args:
        function: the function.
        x: the rows.
        operands: tensors.
        positional: how many of the operands go by position.
        named: the names of the others.
        constants: arguments that are no tensors, as pairs of a name and a value.
    """
    keywords = dict(zip(named, operands[positional:], strict=True)) | dict(constants)
    return function(x, *operands[:positional], **keywords)


# A lambda in a forward is another function in each call.
@lru_cache(maxsize=256)
def _tried(function: FunctionType, formulas: Callable[[], Iterable[Any]], *how: Any) -> tuple[Reads, Any]:
    """Try a function, and return what it reads and the formula that it computes."""
    reads = Reads()
    reads.follow(function)

    # The first calls may import, and fill caches.
    contexts: tuple[Any, ...] = (nullcontext(), reads)

    def fits(formula: Any) -> bool:
        for watched, (dtype, tolerance) in product(contexts, _FUNCTION_TYPES):
            leaves: list[torch.Tensor] = []
            draw = partial(_drawn, leaves, torch.Generator("cpu").manual_seed(0), dtype)
            with watched:
                results = [*formula.trials(function, draw, *how)]
            for pair in results:
                torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
            if dtype is torch.float64:
                # Gradients of what has some: a function may cut them off.
                sides = [torch.utils._pytree.tree_leaves(side) for side in zip(*results, strict=True)]
                ends = [[each.cos().sum() for each in side if each.requires_grad] for side in sides]
                grads = [torch.autograd.grad(each, leaves, materialize_grads=True) for each in ends]
                torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
        return True

    with apart():
        formula = next((each for each in formulas() if attempt(partial(fits, each), False)), None)
    return reads, None if reads.names else formula


def _drawn(leaves: list[torch.Tensor], generator: torch.Generator, dtype: torch.dtype, *size: int) -> torch.Tensor:
    leaves.append(torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_())
    # No leaf, so that a function may write to it.
    return leaves[-1].to(dtype) if dtype is not torch.float64 else leaves[-1].clone()


# Rows and a weight to try a forward with.
_Inputs = tuple[torch.Tensor, torch.Tensor]

# Element types of x and weight that distinguish the orders, and x's leading dimensions.
_PROBES = (
    (torch.bfloat16, torch.bfloat16, (-1,)),
    (torch.bfloat16, torch.float32, (2, -1)),
    (torch.float32, torch.bfloat16, (1, 2, -1)),
)
_PROBE_ELEMENTS = 4096
_MODES: tuple[dict[str, Any], ...] = ({"training": True}, {"training": False})
# Far from any epsilon in use, to detect a forward that reads another attribute.
_OTHER_EPSILON = 0.37


def _try(trial: _Trial, eps: dict[str, float]) -> Formula:
    # Without a weight there is nothing to round before.
    among: list[_Rule] = list(product(CastOrder if trial.has_weight else _GATED_ORDERS[:1], ("",), (False,)))
    if trial.is_gated:
        among = list(product(_GATED_ORDERS, ACTIVATIONS, (False, True)))
    probes = list(trial.probes())
    # A module may have both epsilons; its forward reads one of them, found below.
    training, evaluation = (trial.rules(set(among), probes, set(eps.values()), mode) for mode in _MODES)
    # First calls may import, and fill caches.
    trial.reads.names.clear()
    if not (training and evaluation):
        only = " in evaluation" if training else " in training" if evaluation else ""
        raise LeftAloneError(f"its forward computes something else than {_FORMULA}{only}")
    if not (matching := training & evaluation):
        raise LeftAloneError("its forward rounds elsewhere in training than in evaluation")
    for name in eps:
        followed = matching
        for mode in _MODES:
            followed = trial.rules(followed, probes[:1], {_OTHER_EPSILON}, mode | {name: _OTHER_EPSILON})
        if rule := next((rule for rule in among if rule in followed), None):
            _check_gradient(trial, rule, eps[name])
            _check_extremes(trial, rule, eps[name])
            _check_reads(trial, name)
            return Formula(*rule, name, tuple([each.name for each in trial.inputs]))
    raise LeftAloneError(f"its forward does not read its epsilon from {' or '.join(eps)} when it is called")


class _Trial:
    """A module whose forward can be called on a copy, and random numbers for it: rows, and a weight, fp32.

    The number of rows is even. The weight of a module without one is ones.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        weight = module._parameters.get("weight")
        # A norm without a weight takes rows of any length.
        n = 64 if weight is None else weight.numel()
        generator = torch.Generator("cpu").manual_seed(0)
        count = 2 * max(2, _PROBE_ELEMENTS // (2 * n))
        self.module, self.inputs, self.has_weight = module, _inputs_of(module), weight is not None
        self.is_gated = len(self.inputs) > 1
        self.group_size = vars(module).get("group_size") if self.is_gated else None
        self.reads = Reads(*type(module).__mro__)
        self.rows = torch.randn(count, n, generator=generator, dtype=torch.float32)
        # Rows of every size down to that of eps, so that eps must be in its place.
        self.rows *= torch.logspace(-4, 2, count, dtype=torch.float32)[:, None]
        self.weight = torch.randn(n, generator=generator, dtype=torch.float32) if self.has_weight else torch.ones(n)

    def call(self, x: torch.Tensor, weight: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
        """Return the forward's result for x with another weight, in the mode and with the other attributes given.

        Raises:
            LeftAloneError: forward changes x or the module.
        """
        twin = _twin(self.module, {"weight": weight} if self.has_weight else {}, attributes)
        tensors = {each.name: tensor for each, tensor in zip(self.inputs, (x, _gate(x)), strict=False)}
        watched = (*tensors.values(), weight)
        before, versions = dict(vars(twin)), [each._version for each in watched]
        # Either way of passing x is used.
        by_name = not twin.training and self.inputs[0].kind is not inspect.Parameter.POSITIONAL_ONLY
        forward = partial(type(twin).forward, twin)
        with torch.set_grad_enabled(twin.training), self.reads:
            y = forward(**tensors) if by_name else forward(*tensors.values())
        if [each._version for each in watched] != versions:
            raise LeftAloneError("its forward writes to its input or its weight")
        for name in before.keys() | vars(twin).keys():
            after = vars(twin).get(name)
            if after is not before.get(name) or (isinstance(after, torch.Tensor) and after._version):
                raise LeftAloneError(f"its forward changes its attribute {name}")
        if not isinstance(y, torch.Tensor):
            raise LeftAloneError(f"its forward returns a {type(y).__name__}, and ours a tensor")
        return y

    def rules(
        self, among: set[_Rule], inputs: Iterable[_Inputs], epsilons: set[float], attributes: dict[str, Any]
    ) -> set[_Rule]:
        """Return the rules that reproduce the forward for all inputs, with one of the epsilons."""
        for x, weight in inputs:
            y = self.call(x, torch.nn.Parameter(weight), attributes)
            among = {
                rule
                for rule in among
                if any(_agree(y, _expected(rule, x, weight, eps, self.group_size)) for eps in epsilons)
            }
        return among

    def probes(self) -> Iterator[_Inputs]:
        """Yield random rows and weights that distinguish the orders."""
        for x_dtype, weight_dtype, shape in _PROBES:
            x = self.rows.reshape(*shape, self.rows.shape[-1])
            yield x.to(x_dtype, copy=True), self.weight.to(weight_dtype, copy=True)

    def extremes(self) -> Iterator[_Inputs]:
        """Yield rows and weights of very large and very small numbers, infinities and NaN."""
        row, unit = (each / each.abs().max() for each in (self.rows[-1], self.weight))
        for x_dtype, weight_dtype, most in _EXTREMES:
            largest = torch.finfo(x_dtype).max
            x = torch.stack([row.double() * size for size in (*_MAGNITUDES, largest) if size <= largest] + [row] * 3)
            x[-3:, 0] = torch.tensor([float("inf"), float("-inf"), float("nan")])
            for weight in (self.weight, unit * most)[: 1 + self.has_weight]:
                yield x.to(x_dtype), weight.to(weight_dtype)


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if two results are equal but for a few bf16 roundings, which the order of sums may tip."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    atol = torch.finfo(actual.dtype).tiny
    differing = ~torch.isclose(actual.float(), expected.float(), rtol=1e-5, atol=atol, equal_nan=True)
    step = 2 * torch.finfo(torch.bfloat16).eps
    close = torch.allclose(actual, expected, rtol=step, atol=atol, equal_nan=True)
    return bool(differing.float().mean() < 0.01 and close)


# Element types of x and weight, and the largest weight.
_EXTREMES = (
    (torch.float32, torch.float32, 1e30),
    (torch.bfloat16, torch.bfloat16, 1e30),
    (torch.float16, torch.float16, 6e4),
    (torch.float16, torch.float32, 1e30),
)
# Beyond fp16; at and beyond the largest number whose square fits fp32; denormal in fp16 and in fp32; zero.
_MAGNITUDES = (1e5, 1e18, 1e30, 1e-7, 1e-40, 0.0)


def _check_extremes(trial: _Trial, rule: _Rule, eps: float) -> None:
    """Refuse a forward that clips, or replaces what is not finite."""
    if not all(trial.rules({rule}, trial.extremes(), {eps}, mode) for mode in _MODES):
        raise LeftAloneError(
            f"its forward computes something else than {_FORMULA} of very large or small numbers, infinities or "
            "NaN: it may clip them"
        )


# Attributes of every module, and those that a module of the right build holds besides.
_KEPT = {"weight", "bias", *vars(torch.nn.Module())}
# A forward that reads this value raises, and this result marks that.
_UNREADABLE: Any = type("_Unreadable", (), dict.fromkeys(("__bool__", "__eq__")))()
_RAISED = torch.zeros((), device="cpu")


def _check_reads(trial: _Trial, epsilon_name: str) -> None:
    """Refuse a forward that reads more than its tensors and epsilon: our module would not see a change of the rest."""
    n, weight, ones = trial.weight.numel(), trial.weight, torch.ones_like(trial.weight)
    held = getattr(inspect.unwrap(type(trial.module).forward), "__globals__", {})
    # A table of activations, which the forward looks its own up in, is taken as it is.
    tables = {name for name, value in held.items() if trial.is_gated and isinstance(value, Mapping)}
    read = trial.reads.names - {name for name in tables if not held[name].keys().isdisjoint(ACTIVATIONS)}

    def outcome(weight: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
        parameter = torch.nn.Parameter(weight.clone())
        return attempt(partial(trial.call, trial.rows.clone(), parameter, attributes), _RAISED)

    for (name, value), mode in product(_attributes_of(trial.module, _KEPT | {epsilon_name}), _MODES):
        if trial.is_gated and name in _OF_GATES and isinstance(value, (str, int)):
            continue
        changed, allowed = _UNREADABLE, [outcome(weight, mode)]
        if isinstance(value, bool):
            # A flag may say whether there is a weight.
            changed, allowed = not value, [*allowed, outcome(ones, mode), _RAISED]
        elif isinstance(value, (int, tuple)) and value in (n, (n,)):
            changed, allowed = n + 1 if value == n else (n + 1,), [*allowed, _RAISED]
        if not any(_agree(outcome(weight, mode | {name: changed}), each) for each in allowed):
            read.add(name)
    _refuse_reads(read)


def _attributes_of(module: torch.nn.Module, known: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a module and its own classes hold, but None, methods, and what is known."""
    held = {name: value for cls in reversed(_own(type(module))) for name, value in vars(cls).items()} | vars(module)
    for name, value in held.items():
        if not (name in known or name[:2] == "__" or value is None or hasattr(type(value), "__get__")):
            yield name, value


def _check_gradient(trial: _Trial, rule: _Rule, eps: float) -> None:
    """Refuse a forward whose gradient is not its formula's: one that detaches the mean square, say."""
    # dy follows the row itself, so that the mean square's share of dx is large at any length.
    dy, gradients = trial.rows * trial.weight, []
    for forward in (
        partial(trial.call, attributes=_MODES[0]),
        partial(_expected, rule, eps=eps, group_size=trial.group_size),
    ):
        leaves = (trial.rows.clone().requires_grad_(), torch.nn.Parameter(trial.weight.clone()))
        # A missing gradient counts as zero, and so differs from the formula's.
        summed = (forward(*leaves) * dy).sum() + 0 * sum(leaf.sum() for leaf in leaves)
        # First calls may import, and fill caches.
        torch.autograd.grad(summed, leaves[: 1 + trial.has_weight], retain_graph=True)
        with trial.reads:
            gradients.append(torch.autograd.grad(summed, leaves[: 1 + trial.has_weight]))
    # Bound the error by the size of dx's terms, per row: small rows have large terms. The order of sums costs 1e-6.
    rstd = (trial.rows.square().mean(-1) + eps).rsqrt()
    terms = (rstd * (dy * trial.weight).norm(dim=-1), gradients[1][-1].norm())
    for got, wanted, size in zip(*gradients, terms, strict=False):
        if not bool(((got - wanted).norm(dim=-1) <= 1e-3 * size).all()):
            raise LeftAloneError(f"the gradient of its forward is not that of {_FORMULA}")


def _expected(rule: _Rule, x: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int | None) -> torch.Tensor:
    """Return the result of a formula for x, and for the gate that x is tried with."""
    order, activation, gates_first = rule
    rows = x.float()
    factor = ACTIVATIONS[activation](_gate(x).float()) if activation else None
    if factor is not None and gates_first:
        rows = rows * factor
    if order is CastOrder.CENTRED:
        rows = rows - rows.mean(-1, keepdim=True)
    groups = rows.view(*rows.shape[:-1], -1, group_size or rows.shape[-1])
    rows = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    y: torch.Tensor
    if order.rounds_first:
        y = weight * rows.to(x.dtype if order is CastOrder.TO_INPUT_BEFORE_WEIGHT else weight.dtype)
    else:
        y = (order.weight_offset + weight.float()) * rows
    if factor is not None and not gates_first:
        return (y * factor).to(x.dtype)
    return y if order.rounds_first else y.to(x.dtype)


def _gate(x: torch.Tensor) -> torch.Tensor:
    """Return a gate for x, which depends on x, so that gradients of x include those of the gate."""
    steps = torch.linspace(-6, 6, x.numel(), dtype=torch.float32).reshape(x.shape)
    return (steps + x.float().nan_to_num(0, 0, 0).clamp(-1, 1)).to(x.dtype)
