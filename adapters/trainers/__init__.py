"""Trainers as weight sources: one file per framework, none imported here.

from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.adapters.state_dict import StateDictSource
"""
