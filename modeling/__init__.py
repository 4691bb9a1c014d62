"""What is published to the Hub: configurations and models of drafters. Weights and a pure forward, nothing else."""

from .configuration_dspark import DSparkConfig
from .configuration_speculation import SpeculationConfig
from .modeling_dspark import DSparkDrafter

__all__ = ["DSparkConfig", "DSparkDrafter", "SpeculationConfig"]
