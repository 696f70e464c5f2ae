"""Seconds to save a state to S3's interface beside boto3 sending the same bytes, in one JSON line.

    python benchmarks/bucket_saves.py --mib 128 --rounds 5

Both send to moto's server on this machine, in turns: a checkpoint of spmd with all that belongs to
it, and the same shards as objects by boto3's `put_object` from as many threads as TensorStore has
requests at a time. A server in Python is the limit of both; the ratio is of interest, and the bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import boto3
import botocore.config
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint.manager import CheckpointManager
from spmd.distributed.local import free_port
from spmd.sharding.mesh import simulate_devices
from spmd.storage.address import parse_address
from spmd.storage.bucket import Bucket

THREADS = 32
"""Requests at a time: TensorStore's default for S3."""
SERVER = """
import logging, sys
from moto.server import main
logging.getLogger("werkzeug").setLevel(logging.ERROR)
main(["-p", sys.argv[1]])
"""


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    """Start moto with a bucket; its process and its address."""
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], **quiet)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
            return process, url
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def make_state(mib: int) -> dict[str, jax.Array]:
    """Arrays of 4 MiB over eight devices, one shard each."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    sharding = NamedSharding(mesh, P("fsdp"))
    arrays = {}
    for number in range(max(1, mib // 4)):
        values = jnp.arange(1 << 20, dtype=jnp.float32).reshape(8, -1) + number
        arrays[f"layer{number}"] = jax.device_put(values, sharding)
    return arrays


def save_with_spmd(state: dict[str, jax.Array], address: str, step: int) -> None:
    with CheckpointManager(address, owner=step, max_to_keep=99) as checkpoints:
        checkpoints.save(step, state)


def save_with_boto3(state: dict[str, jax.Array], client: object, step: int) -> None:
    shards = {}
    for name, array in state.items():
        for shard in array.addressable_shards:
            shards[f"boto3/{step}/{name}/{shard.device.id}"] = np.asarray(shard.data)
    with ThreadPoolExecutor(THREADS) as pool:
        for key, values in shards.items():
            pool.submit(client.put_object, Bucket="bucket", Key=key, Body=values.tobytes())


def timed(save: Callable[[], None]) -> float:
    began = time.perf_counter()
    save()
    return time.perf_counter() - began


def main() -> None:
    """Save in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    process, url = start_server()
    try:
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "a"}
        simulate_devices(8)
        state = make_state(options.mib)
        settings = botocore.config.Config(max_pool_connections=THREADS)
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=settings)
        address = f"s3://bucket/spmd?endpoint={url}"
        ours, theirs = [], []
        for step in range(1, options.rounds + 2):
            ours.append(timed(lambda step=step: save_with_spmd(state, address, step)))
            theirs.append(timed(lambda step=step: save_with_boto3(state, client, step)))
        stored = Bucket(parse_address(address))
        names = stored.list("state/1.1/")
        size = sum(len(stored.read(name)) for name in names)
        manifest = len(stored.read("steps/1.json"))
    finally:
        process.kill()
        process.wait()
    own, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    state_bytes = sum(array.nbytes for array in state.values())
    record = {
        "mib": options.mib,
        "objects": len(names) + 1,
        "spmd_s": round(own, 3),
        "boto3_s": round(other, 3),
        "ratio": round(own / other, 3),
        "bytes_of_state": round((size + manifest) / state_bytes, 5),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
