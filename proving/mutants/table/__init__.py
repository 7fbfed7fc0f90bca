"""The mutants, by what they break."""

from __future__ import annotations

from . import (
    autograd,
    cold_warm,
    deployment,
    dispatch,
    dropout,
    forward,
    gating,
    generator,
    gradients,
    grouping,
    jax,
    keys,
    modulation,
    primitives,
    quantisation,
    tracing,
)

MUTANTS = (
    *forward.MUTANTS,
    *quantisation.MUTANTS,
    *primitives.MUTANTS,
    *gradients.MUTANTS,
    *dispatch.MUTANTS,
    *keys.MUTANTS,
    *cold_warm.MUTANTS,
    *autograd.MUTANTS,
    *tracing.MUTANTS,
    *deployment.MUTANTS,
    *generator.MUTANTS,
    *modulation.MUTANTS,
    *gating.MUTANTS,
    *grouping.MUTANTS,
    *dropout.MUTANTS,
    *jax.MUTANTS,
)
