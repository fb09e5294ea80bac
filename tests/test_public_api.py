"""What users type is pinned here: a change of a name, a default's type or an error's place is a decision."""

import dataclasses
import importlib
import inspect
import re

import pytest

import fp8bridge
import fp8bridge.errors as errors

PUBLIC = [
    "Bridge",
    "BridgeConfig",
    "BridgeError",
    "LoopbackServer",
    "Plan",
    "ServerEvent",
    "ServerLayout",
    "Shard",
    "SyncReport",
    "TensorMeta",
    "WeightSource",
    "connect",
    "errors",
]
CONFIG_FIELDS = [
    "transport",
    "group_backend",
    "rule",
    "bucket_nbytes",
    "senders",
    "streams",
    "allow_cast",
    "min_healthy",
    "keep_last",
    "pause_mode",
    "host",
    "curve_key_file",
    "allow_plaintext",
    "api_key",
    "admin_api_key",
    "request_timeout_s",
    "open_timeout_s",
    "bucket_timeout_s",
    "update_timeout_s",
    "collective_timeout_s",
    "report_path",
    "trace_path",
    "metrics_port",
]
BRIDGE_MEMBERS = [
    "admit",
    "close",
    "kept_versions",
    "rollback",
    "server_checksums",
    "servers",
    "update_weights",
    "verify",
]


def test_the_public_names():
    assert fp8bridge.__all__ == PUBLIC
    assert all(getattr(fp8bridge, name) is not None for name in PUBLIC), "the lazy ones load"
    assert set(PUBLIC) <= set(dir(fp8bridge))
    with pytest.raises(AttributeError, match="no attribute 'Bridges'"):
        _ = fp8bridge.Bridges


def test_the_config_fields():
    assert [f.name for f in dataclasses.fields(fp8bridge.BridgeConfig)] == CONFIG_FIELDS
    assert all(f.default is not dataclasses.MISSING for f in dataclasses.fields(fp8bridge.BridgeConfig))


def test_the_members_of_a_bridge():
    assert [name for name in dir(fp8bridge.Bridge) if not name.startswith("_")] == BRIDGE_MEMBERS


def test_a_report_is_plain_data_for_a_logger():
    fields = {f.name for f in dataclasses.fields(fp8bridge.SyncReport)}
    assert {"version", "seconds", "stages", "nbytes", "servers", "fallbacks", "plan_hash"} <= fields


def _documented(owner: object, name: str) -> bool:
    doc = inspect.getdoc(getattr(owner, name))
    # A dataclass without a docstring gets its signature for one.
    return bool(doc) and not doc.startswith(f"{name}(")


def test_what_is_public_has_a_docstring():
    missing = [name for name in PUBLIC if not _documented(fp8bridge, name)]
    missing += [f"Bridge.{name}" for name in BRIDGE_MEMBERS if not _documented(fp8bridge.Bridge, name)]
    for module_name in ("fp8bridge.kernels", "fp8bridge.adapters.megatron", "fp8bridge.adapters.state_dict"):
        module = importlib.import_module(module_name)
        for name, thing in vars(module).items():
            ours = getattr(thing, "__module__", "").startswith(module_name)
            if not name.startswith("_") and ours and callable(thing) and not _documented(module, name):
                missing.append(f"{module_name}.{name}")
    assert not missing, f"no docstring: {', '.join(missing)}"


def test_the_error_tree_is_the_one_in_the_docstring():
    drawn, parents = {}, []
    for indent, name in re.findall(r"^([│├└─ ]*)([A-Z]\w+Error)\b", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 4
        drawn[name] = parents[depth - 1] if depth else None
        parents[depth:] = [name]
    real = {
        name: None if cls is errors.BridgeError else cls.__mro__[1].__name__
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, BaseException)
    }
    assert drawn == real
    assert issubclass(errors.ConfigError, ValueError), "as the docstring says"


@pytest.mark.parametrize("field", ["server", "bucket", "version", "tensor"])
def test_an_error_says_where(field):
    error = errors.TransportError("lost", **{field: 3})
    assert getattr(error, field) == 3
    assert str(error) == error.message == "lost"
    again = errors.error_from_dict(error.to_dict())
    assert type(again) is errors.TransportError
    assert getattr(again, field) == 3
