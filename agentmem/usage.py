"""What an open store holds and has done, as one flat dict of numbers.

Takes no lock that running a model needs: whoever watches a store must not hold it up.
"""

from agentmem._lmdb import Environment
from agentmem.racing import PREFILL
from agentmem.reasons import Reason
from agentmem.runtime import Runtime

_MISSES = (Reason.MISSING, Reason.DAMAGED, Reason.NOT_SAVED, Reason.TIER_UNAVAILABLE)
"""Why KV was in no tier that was asked for it."""


def usage(runtime: Runtime, environment: Environment) -> dict[str, int | float]:
    """Return bytes per tier, its budget, hit rate and speed (left out where there is none), and the counters.

    Nobody is asked over the network: a server that hangs must not make its watcher hang.
    """
    counters = runtime.counters.snapshot()
    return {**_held(runtime, environment, counters), **_budgets(runtime, environment), **_rates(runtime, counters)} | (
        counters
    )


def _held(runtime: Runtime, environment: Environment, counters: dict[str, int]) -> dict[str, int | float]:
    disk, host = runtime.blocks.disk, runtime.blocks.host
    totals, num_reused = disk.stats(), counters.get("tokens_restored", 0)
    return {
        "device_nbytes": runtime.device.nbytes,
        "host_nbytes": host.nbytes,
        "host_num_blocks": len(host),
        "disk_num_blocks": totals.num_blocks,
        "disk_raw_nbytes": totals.raw_nbytes,
        "disk_stored_nbytes": totals.stored_nbytes,
        "disk_live_nbytes": environment.live_nbytes,
        "file_nbytes": environment.nbytes,
        "records_healed": environment.num_healed,
        "blocks_healed": disk.num_healed,
        "ssd_written_nbytes": disk.written_nbytes,
        "ssd_written_nbytes_per_token_reused": disk.written_nbytes / num_reused if num_reused else 0.0,
    }


def _budgets(runtime: Runtime, environment: Environment) -> dict[str, int]:
    budgets = {
        "device_budget_nbytes": runtime.device.budget_nbytes,
        "host_budget_nbytes": runtime.blocks.host.budget_nbytes,
        "disk_budget_nbytes": environment.quota.budget_nbytes,
    }
    return {name: nbytes for name, nbytes in budgets.items() if nbytes is not None}


def _rates(runtime: Runtime, counters: dict[str, int]) -> dict[str, float]:
    lower = runtime.blocks.lower
    rates = {
        f"{name}_tokens_per_s" if name == PREFILL else f"{name}_nbytes_per_s": rate
        for name, rate in lower.rates.snapshot().items()
    }
    # in the order in which they are asked
    names = ["device", runtime.blocks.host.name, runtime.blocks.disk.name, *(tier.name for tier in lower.tiers)]
    return rates | _hit_rates(names, counters, runtime.adapter.spec.token_nbytes)


def _hit_rates(names: list[str], counters: dict[str, int], token_nbytes: int) -> dict[str, float]:
    """Return for each tier the part of the bytes looked for there that it had; the next tier was asked for the rest."""
    asked = sum(counters.get(f"tokens_lost_{reason.value}", 0) for reason in _MISSES) * token_nbytes
    found: dict[str, float] = {}
    for name in reversed(names):
        if name == "device":
            served = counters.get("tokens_on_device", 0) * token_nbytes
        else:
            served = counters.get(f"{name}_to_device_nbytes", 0)
        asked += served
        if asked:
            found[f"{name}_hit_rate"] = served / asked
    return found
