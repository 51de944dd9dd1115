"""The visible-devices variables, by documented driver semantics; devices are invented, the parsing is real."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhal.detection.visible import PhysicalDevice, Slice, describe, visible_cuda, visible_hip
from kvhal.errors import PlatformError
from kvhal.readings import Known

GIB = 2**30
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-1111-2222-333344445555")
MIG_A = Slice("MIG-11111111-aaaa-bbbb-cccc-000000000001", Known(20 * GIB, "nvml"), (1, 0))
MIG_B = Slice("MIG-11111111-aaaa-bbbb-cccc-000000000002", Known(40 * GIB, "nvml"), (2, 0))


def devices(count: int = 2) -> tuple[PhysicalDevice, ...]:
    return tuple(
        PhysicalDevice(i, UUIDS[i] if i < len(UUIDS) else f"GPU-{i:016x}", Known(80 * GIB, "nvml"))
        for i in range(count)
    )


def mig_box() -> tuple[PhysicalDevice, ...]:
    plain, other = devices()
    return plain, PhysicalDevice(1, other.uuid, other.memory, (MIG_A, MIG_B))


def cuda(value: str | None, physical: tuple[PhysicalDevice, ...] | None = None) -> list[int]:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    found = visible_cuda(env, devices() if physical is None else physical)
    assert [v.index for v in found] == list(range(len(found)))
    return [v.physical.index for v in found]


def hip(count: int, **env: str) -> list[int]:
    return [v.physical.index for v in visible_hip({f"{k}_VISIBLE_DEVICES": v for k, v in env.items()}, devices(count))]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1]),
        ("", []),
        (" ", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("1, 0", [1, 0]),
        ("1,", [1]),
        ("0,-1,1", [0]),
        ("-1", []),
        ("-1,7", []),
        (UUIDS[1], [1]),
        (f"{UUIDS[1]},{UUIDS[0]}", [1, 0]),
        ("GPU-8932f", [0]),
        ("GPU-8932A", [1]),
    ],
)
def test_the_list_selects_devices_in_its_own_order(value: str | None, expected: list[int]) -> None:
    assert cuda(value) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("7", "names device 7, which is not here"),
        ("0,7", "names device 7"),
        ("GPU-8932", "fits 2 devices"),
        ("GPU-ffff", "'GPU-ffff', which is not here"),
        ("GPU-", "no number"),
        ("MIG-ffff", "names MIG slice 'MIG-ffff', which is not here"),
        ("1,1", "twice"),
        (f"GPU-8932f,{UUIDS[0]}", "twice"),
        ("0,GPU-8932a", "mixes numbers and UUIDs"),
        ("0,,1", "has ''"),
        ("1gpu", "has '1gpu'"),
        ("+1", "has '+1'"),
        ("²", "no number"),
        ("all", "has 'all'"),
    ],
)
def test_a_name_that_selects_nothing_is_an_error_that_quotes_everything(value: str, says: str) -> None:
    with pytest.raises(PlatformError) as caught:
        cuda(value)
    message = str(caught.value)
    assert says in message
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in message
    assert "found 2 device(s): 0: GPU-8932f937" in message
    assert "correct CUDA_VISIBLE_DEVICES or unset it" in message


@pytest.mark.parametrize("value", [MIG_B.uuid, f"MIG-{UUIDS[1]}/2/0"])
def test_a_slice_is_logical_device_0_with_its_own_memory(value: str) -> None:
    (found,) = visible_cuda({"CUDA_VISIBLE_DEVICES": value}, mig_box())
    assert (found.index, found.uuid, found.memory) == (0, MIG_B.uuid, MIG_B.memory)
    assert found.physical.index == 1


@pytest.mark.parametrize("value", ["1", UUIDS[1], None, f"{MIG_A.uuid},{MIG_B.uuid}"])
def test_a_sliced_device_stands_for_one_slice_and_hides_the_rest(value: str | None) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    (found,) = visible_cuda(env, mig_box())
    assert (found.index, found.memory) == (0, MIG_A.memory)


def test_an_abbreviated_slice_is_refused_and_the_slices_are_listed() -> None:
    with pytest.raises(PlatformError, match=MIG_A.uuid):
        visible_cuda({"CUDA_VISIBLE_DEVICES": "MIG-11111111"}, mig_box())


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR": "2,3"}, [2, 3]),
        ({"ROCR": "3,1", "HIP": "1"}, [1]),
        ({"ROCR": "2,3", "CUDA": "1,0"}, [3, 2]),
        ({"HIP": "1, 0"}, [1, 0]),
        ({"CUDA": "3"}, [3]),
        ({"HIP": "1,0", "CUDA": "1, 0"}, [1, 0]),
        ({"HIP": ""}, []),
        ({"ROCR": ""}, []),
        ({"ROCR": "1", "HIP": ""}, []),
        ({"ROCR": "0,-1,1"}, [0]),
        ({"ROCR": "gpu-8932f", "HIP": "0"}, [0]),
    ],
)
def test_hip_variables_compose_outer_filter_first(env: Mapping[str, str], expected: list[int]) -> None:
    assert hip(4, **env) == expected


def test_an_index_beyond_what_the_outer_filter_left_names_both_variables() -> None:
    with pytest.raises(PlatformError) as caught:
        hip(4, ROCR="2,3", HIP="2")
    assert "HIP_VISIBLE_DEVICES='2'" in str(caught.value)
    assert "found 2 device(s) after ROCR_VISIBLE_DEVICES='2,3'" in str(caught.value)


@pytest.mark.parametrize("other", ["1", ""])
def test_two_names_for_the_same_filter_must_agree(other: str) -> None:
    with pytest.raises(PlatformError, match=f"HIP_VISIBLE_DEVICES={other!r} and CUDA_VISIBLE_DEVICES='0'"):
        hip(2, HIP=other, CUDA="0")


def test_an_invalid_outer_filter_is_blamed_by_its_name() -> None:
    with pytest.raises(PlatformError, match=r"^ROCR_VISIBLE_DEVICES='9' .* ROCR_VISIBLE_DEVICES or unset it$"):
        hip(2, ROCR="9", HIP="0")


def test_no_device_at_all_is_no_device_and_an_index_then_is_an_error() -> None:
    assert cuda(None, ()) == []
    with pytest.raises(PlatformError, match=r"found 0 device\(s\): none"):
        cuda("0", ())


def test_describe_quotes_what_is_set() -> None:
    assert describe({"A": "", "B": "1"}, ("A", "B")) == "A='', B='1'"
    assert describe({}, ("A", "B")) == "none of A, B is set"


@given(st.text(alphabet="0123-, GPUMIGa/", max_size=12))
def test_any_text_gives_distinct_devices_or_an_error_that_quotes_it(value: str) -> None:
    try:
        chosen = cuda(value)
    except PlatformError as error:
        assert repr(value) in str(error)
    else:
        assert len(set(chosen)) == len(chosen)
