"""What is published to the Hub: configurations and models of drafters. Weights and a pure forward, nothing else."""

from .configuration_assistant import AssistantConfig
from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config
from .configuration_mtp import MTPConfig
from .configuration_speculation import SpeculationConfig
from .modeling_assistant import AssistantDrafter
from .modeling_dspark import DSparkDrafter
from .modeling_eagle3 import Eagle3Drafter
from .modeling_mtp import MTPDrafter

__all__ = [
    "AssistantConfig",
    "AssistantDrafter",
    "DSparkConfig",
    "DSparkDrafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "MTPConfig",
    "MTPDrafter",
    "SpeculationConfig",
]
