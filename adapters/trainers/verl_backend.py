"""`custom_backend_module: fp8bridge.adapters.verl_backend`: verl imports this on each worker and on the driver, and
that registers the backend."""

from .verl import register

register()
