"""Objects, mirrored folders, leases and checkpoints in buckets, on servers that are started for real."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint import zarr_arrays
from spmd.checkpoint.arrays import bytes_read
from spmd.checkpoint.manager import CheckpointManager
from spmd.data import cache_folder, token_cache
from spmd.data.cache_folder import CacheFolder
from spmd.data.chat import ChatConfig, find_template
from spmd.data.image_shards import ImageShards
from spmd.data.images import ImageFolder
from spmd.data.loader import DataConfig
from spmd.data.sources import find_files
from spmd.data.text_dataset import open_text
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import CheckpointError, ConfigError, DataError, StorageError
from spmd.hf.safetensors import SafetensorsFile, StoredTensor, write_safetensors
from spmd.hf.stored_bytes import BucketBytes, DamagedBytesError
from spmd.report.page import check_file
from spmd.resilience import lease as lease_module
from spmd.resilience import lease_files
from spmd.resilience.lease import EXIT_LOST, Lease
from spmd.run import program_cache as program_cache_module
from spmd.run.load_config import find_file, local_target
from spmd.run.program_cache import BucketPrograms, cache_problems, program_cache
from spmd.run.run_dir import METRICS, RunDir
from spmd.storage import bucket as bucket_module
from spmd.storage import download as download_module
from spmd.storage import mirror as mirror_module
from spmd.storage import shared_folders
from spmd.storage.address import locate
from spmd.storage.bucket import Bucket, Version
from spmd.storage.mirror import Mirror
from spmd.storage.output_file import output_problems, write_output
from spmd.training.compilation_cache import watch_cache_hits
from tests.chats import write_tokenizer
from tests.google_storage import google_storage
from tests.object_stores import FaultProxy, environment, started_servers
from tests.tiers import soak_but
from tests.train_runs import ROOT
from tests.unit.test_image_shards import encoded, write_tar

STORES = ("s3", "gs")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A server of each kind, which this process finds by its variables."""
    with started_servers(tmp_path_factory.mktemp("gcs")) as found:
        yield found


@pytest.fixture
def s3(servers):
    return servers["s3"]


@pytest.fixture(params=["s3", "google"])
def store(servers, request):
    """Servers whose conditional writes hold."""
    if request.param == "s3":
        yield servers["s3"]
    else:
        with google_storage() as server, environment(server.environment):
            yield server


@pytest.fixture
def key(request):
    """A key of the test's own."""
    return f"test-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"


def bucket(server, key, **options):
    return Bucket(locate(server.address(key)), **options)


@pytest.mark.parametrize("kind", STORES)
def test_objects_are_written_read_listed_and_deleted(servers, key, kind):
    objects = bucket(servers[kind], key)
    objects.check()
    objects.write("a/b", b"1")
    objects.write("a/c", b"22")
    objects.write("az", b"")
    assert objects.list() == ["a/b", "a/c", "az"]
    assert objects.list("a/") == ["a/b", "a/c"]
    assert objects.read("a/c") == b"22"
    assert [found.data for found in objects.find_all(["a/b", "zz", "az"])] == [b"1", None, b""]
    assert [objects.exists(name) for name in ("a/b", "zz", "az", "a")] == [True, False, True, False]
    for name, refused in ((f"{key}/a/b", True), (f"{key}/a", False)):
        folder = RunDir(locate(servers[kind].address(name)))
        with pytest.raises(CheckpointError, match="is an object") if refused else nullcontext():
            folder.check_use("never")
    with pytest.raises(FileNotFoundError):
        objects.read("zz")
    with pytest.raises(ValueError, match="2 bytes, above the limit of 1"):
        objects.read("a/c", 1)
    objects.delete_below("a/")
    objects.delete("zz")
    assert objects.list() == ["az"]
    assert abs(objects.now() - time.time()) < 60


def test_conditional_writes_hold(store, key):
    objects = bucket(store, key)
    first = objects.create("one", b"first")
    assert isinstance(first, Version)
    assert objects.create("one", b"second") is None
    second = objects.replace("one", b"second", first)
    assert second not in (None, first)
    assert objects.replace("one", b"third", first) is None
    assert objects.read("one") == b"second"


def race(objects, name, create, claimants=6):
    """How many of several that create an object at the same time believe that it is theirs."""
    together = threading.Barrier(claimants)
    winners = []

    def claim(number):
        together.wait(30)
        if create(objects, name, str(number).encode()):
            winners.append(number)

    threads = [threading.Thread(target=claim, args=[number]) for number in range(claimants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(winners)


@pytest.mark.parametrize("races", soak_but([20, 1000], 20))
def test_of_several_creators_one_wins(store, key, races):
    """The control: with writes that ask for nothing, several would."""
    objects = bucket(store, key)
    for number in range(races):
        assert race(objects, f"conditional/{number}", Bucket.create) == 1

    def overwrite(objects, name, data):
        is_absent = objects.find(name).data is None
        objects.write(name, data)
        return is_absent

    assert max(race(objects, f"control/{number}", overwrite) for number in range(20)) > 1


def test_a_write_whose_answer_is_lost_is_the_writers_own(s3, key):
    """It happened, so the repeated request finds the object; the control: another's content is not taken for it."""
    with FaultProxy(s3) as proxy:
        objects = Bucket(locate(s3.through(proxy, key)))
        objects.find("one")
        proxy.fault, proxy.times = "lose", 1
        assert objects.replace("one", b"mine", objects.find("zz").version) is not None
        assert proxy.times == 0
        proxy.times = 1
        found = bucket(s3, key).find("one")
        bucket(s3, key).write("one", b"another's")
        assert objects.replace("one", b"mine, later", found.version) is None


@pytest.mark.parametrize("fault", soak_but(["refuse", "cut", "lose"], "lose"))
def test_requests_are_repeated_while_the_store_does_not_answer(s3, key, fault):
    said = []
    with FaultProxy(s3, fault, times=9) as proxy:
        objects = Bucket(locate(s3.through(proxy, key)), said.append, patience=60)
        objects.write("one", b"1")
        assert objects.read("one") == b"1"
    assert proxy.times == 0
    assert "does not answer" in said[0]
    assert "retrying for up to 60 s" in said[0]
    assert "answers again" in said[1]


@pytest.mark.soak
def test_patience_ends(s3, key):
    with FaultProxy(s3, "refuse") as proxy:
        objects = Bucket(locate(s3.through(proxy, key)), patience=1)
        with pytest.raises(StorageError, match="does not answer") as caught:
            objects.read("one")
    assert caught.value.is_transient


def test_a_bucket_that_does_not_exist_is_one_sentence(servers):
    for address in ("s3://no-such-bucket/run", "gs://no-such-bucket/run"):
        with pytest.raises(StorageError, match="the bucket no-such-bucket does not exist"):
            Bucket(locate(address)).check()


def test_a_single_file_is_written(s3, key):
    """By its address; a bucket that does not exist is known before."""
    file = s3.address(f"{key}/report.html")
    for options in ("", "?region=us-east-1"):
        assert not check_file("--out", file + options)
        write_output("--out", file + options, f"a report {options}")
        assert bucket(s3, key).read("report.html") == f"a report {options}".encode()
    top = s3.address(f"{key}.html")
    write_output("--out", top, "at the top")
    assert Bucket(locate(top).parent).read(f"{key}.html") == b"at the top"
    absent = "s3://no-such-bucket/report.html"
    (problem,) = output_problems("--out", absent)
    what = f"--out: {absent}: the bucket no-such-bucket does not exist"
    assert str(problem).splitlines()[0] == what


@pytest.mark.parametrize("kind", STORES)
def test_a_mirror_has_the_files_of_a_folder(servers, key, kind, monkeypatch):
    """A file that grows is uploaded in parts, a new one whole; another mirror joins them to the same bytes."""
    monkeypatch.setattr(mirror_module, "SMALL", 100)
    objects = bucket(servers[kind], key)
    objects.write("checkpoints/steps/1.json", b"not a file of the folder")
    mirror = Mirror(objects, excluded=("checkpoints/",))
    lines = mirror.folder / "logs" / "metrics.jsonl"
    lines.parent.mkdir()
    text = b"".join(b'{"step": %d}\n' % step for step in range(100))

    def pulled():
        other = Mirror(objects, excluded=("checkpoints/",))
        other.pull()
        files = [path for path in other.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(other.folder)): path.read_bytes() for path in sorted(files)}

    for end in (300, 310, 400, 401, 500):
        with lines.open("ab") as file:
            file.write(text[lines.stat().st_size if lines.exists() else 0 : end])
        mirror.push()
        assert pulled() == {"logs/metrics.jsonl": text[:end]}
    assert len(objects.list("logs/metrics.jsonl.parts/")) == 4
    mirror.push()  # nothing has changed
    lines.write_bytes(text[:120])
    mirror.push()
    assert objects.list("logs/") == ["logs/metrics.jsonl"]
    with lines.open("ab") as file:
        file.write(b"more\n")
    mirror.push()
    assert pulled() == {"logs/metrics.jsonl": text[:120] + b"more\n"}
    # Parts of an earlier content, or of an earlier writer, count for nothing.
    now = text[200:400]
    lines.write_bytes(now)
    mirror.push()
    earlier = hashlib.sha256(text[:300]).hexdigest()[:16]
    objects.write(f"logs/metrics.jsonl.parts/{earlier}-000000.000009-{120:015d}", b"stale")
    assert pulled() == {"logs/metrics.jsonl": now}
    tag = hashlib.sha256(now).hexdigest()[:16]
    objects.write(f"logs/metrics.jsonl.parts/{tag}-000001.000001-{len(now):015d}", b"late")
    objects.write(f"logs/metrics.jsonl.parts/{tag}-000002.000000-{len(now):015d}", b"new\n")
    assert pulled() == {"logs/metrics.jsonl": now + b"new\n"}
    # Edited in place, with the same size and the same end.
    plan = mirror.folder / "plan.txt"
    plan.write_bytes(b"a" + bytes(9000))
    mirror.push()
    plan.write_bytes(b"b" + bytes(9000))
    mirror.push()
    assert pulled()["plan.txt"][:1] == b"b"
    objects.delete("plan.txt")
    objects.write("folder/", b"")
    assert list(pulled()) == ["logs/metrics.jsonl"]


@pytest.mark.parametrize("kind", STORES)
def test_texts_are_read_from_local_copies(servers, key, kind, tmp_path, monkeypatch):
    """The same corpus as of a folder; an object is downloaded again when it has changed, and only then."""
    monkeypatch.setattr(download_module, "DOWNLOADS", tmp_path / "downloads")
    monkeypatch.setattr(bucket_module, "_PART_BYTES", 1000)
    objects = bucket(servers[kind], key)
    folder = tmp_path / "texts"
    texts = {
        "a.txt": "one\n" * 900,
        "b/c.txt": "two\n" * 250,
        "b/d.txt": "three\n",
        "e.bin": "no text",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        objects.write(name, text.encode())
    address = servers[kind].address(key)

    def digests(source):
        return [(file.key, file.digest) for file in find_files([source])]

    assert digests(address) == digests(str(folder))
    assert len(digests(address)) == 3
    assert digests(f"{address}/a.txt") == digests(str(folder / "a.txt"))
    copies = tmp_path / "downloads" / kind / servers[kind].bucket / key
    before = {path.name: path.stat().st_mtime_ns for path in copies.rglob("*.txt")}
    objects.write("b/d.txt", b"four\n")
    objects.delete("b/c.txt")
    (folder / "b" / "d.txt").write_text("four\n")
    (folder / "b" / "c.txt").unlink()
    assert digests(address) == digests(str(folder))
    after = {path.name: path.stat().st_mtime_ns for path in copies.rglob("*.txt")}
    assert before["a.txt"] == after["a.txt"]
    assert before["d.txt"] != after["d.txt"]
    with pytest.raises(DataError, match="does not exist"):
        find_files([f"{address}/none"])


def test_a_tokenizer_is_read_with_the_files_beside_it(s3, key, tmp_path, monkeypatch):
    """Its end tokens are in another file; large files beside it are not downloaded."""
    monkeypatch.setattr(download_module, "DOWNLOADS", tmp_path / "downloads")
    (tmp_path / "local").mkdir()
    write_tokenizer(tmp_path / "local")
    objects = bucket(s3, key)
    for file in (tmp_path / "local").iterdir():
        objects.write(file.name, file.read_bytes())
    objects.write("model.safetensors", b"large")
    ours = load_tokenizer(s3.address(f"{key}/tokenizer.json"))
    theirs = load_tokenizer(str(tmp_path / "local" / "tokenizer.json"))
    assert (ours.name, ours.vocab, ours.eos) == (theirs.name, theirs.vocab, theirs.eos)
    assert not list((tmp_path / "downloads").rglob("*.safetensors"))


@pytest.fixture
def text_cache(monkeypatch):
    """Makes the caches of tokenized text of several hosts, each with a disk of its own."""
    monkeypatch.setattr(shared_folders, "_POLL", 0.02)
    monkeypatch.setattr(shared_folders, "_PART_BYTES", 1000)

    def make(server, key, disk):
        monkeypatch.setattr(cache_folder, "_DEFAULT", str(disk))
        return CacheFolder.of(server.address(key))

    return make


def numbers_in(folder):
    """Whether a folder has the numbers that `test_text_is_tokenized_by_one_host` builds."""
    try:
        return np.load(folder / "ids.npy").sum() == np.arange(700).sum()
    except (OSError, ValueError):
        return False


def test_text_is_tokenized_by_one_host(store, key, text_cache, tmp_path):
    """The others download it; a host that finds it damaged builds it again. Control: without a bucket, each builds."""
    builders = []

    def build(folder):
        builders.append(folder)
        time.sleep(0.2)
        np.save(folder / "ids.npy", np.arange(700))

    caches = [text_cache(store, key, tmp_path / str(host)) for host in range(3)]
    with ThreadPoolExecutor(3) as hosts:
        assert all(hosts.map(lambda cache: cache.make("text", build, numbers_in), caches))
    assert len(builders) == 1
    assert all(numbers_in(cache.local / "text") for cache in caches)
    objects = bucket(store, key)
    assert objects.list() == ["text.json", *(f"text/ids.npy/{part:08}" for part in range(6))]
    objects.write("text/ids.npy/00000003", b"other")
    assert text_cache(store, key, tmp_path / "late").make("text", build, numbers_in)
    assert len(builders) == 2
    assert text_cache(store, key, tmp_path / "later").make("text", build, numbers_in)
    assert len(builders) == 2
    assert CacheFolder(tmp_path / "alone").make("text", build, numbers_in)
    assert len(builders) == 3


def test_a_host_that_is_lost_while_it_tokenizes_is_replaced(
    s3, key, text_cache, tmp_path, monkeypatch
):
    """Once its claim is not written again for long enough; until then nobody who need not wait does."""
    monkeypatch.setattr(shared_folders, "_EXPIRY", 0.5)
    objects = bucket(s3, key)
    objects.write("text.claim", b"a lost host")
    cache = text_cache(s3, key, tmp_path / "disk")

    def build(folder):
        assert objects.find("text.claim").data != b"a lost host"
        np.save(folder / "ids.npy", np.arange(700))

    assert not cache.make("text", build, numbers_in, wait=False)
    began = time.monotonic()
    assert cache.make("text", build, numbers_in)
    assert time.monotonic() - began >= 0.5
    assert objects.find("text.claim").data is None


def test_streamed_blocks_are_shared(s3, key, text_cache, tmp_path, monkeypatch):
    """Rows are those of a cache on a disk, and the second host tokenizes nothing."""
    source = tmp_path / "texts"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(name * 40_000)

    def rows(cache):
        config = DataConfig((str(source),), sequence=32, streaming=True, cache=cache)
        return open_text(config).sets[0].order(0).read(np.arange(50))["tokens"]

    expected = rows(str(tmp_path / "on a disk"))
    for host in range(2):
        monkeypatch.setattr(cache_folder, "_DEFAULT", str(tmp_path / f"host {host}"))
        np.testing.assert_array_equal(rows(s3.address(key)), expected)
        monkeypatch.setattr(token_cache, "tokenize", None)


def test_images_and_templates_are_read_by_address(s3, key, tmp_path, monkeypatch):
    """A folder of images, a range of shards, and a chat template; what does not exist is one sentence."""
    monkeypatch.setattr(download_module, "DOWNLOADS", tmp_path / "downloads")
    image = encoded(0)
    objects = bucket(s3, key)
    for name in "ab":
        objects.write(f"folder/{name}/1.png", image)
        local = write_tar(tmp_path / f"{name}.tar", [("k.png", image), ("k.cls", name.encode())])
        objects.write(f"{'ab'.index(name):02}.tar", local.read_bytes())
    objects.write("chat.jinja", b"{{ messages[0].content }}")
    assert ImageFolder(s3.address(f"{key}/folder"), size=8).classes == ("a", "b")
    assert len(ImageShards(s3.address(f"{key}/{{00..01}}.tar"), size=8)) == 2
    template = ChatConfig(template=s3.address(f"{key}/chat.jinja"))
    assert find_template(template, (), {}).source == "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"03\.tar: does not exist"):
        ImageShards(s3.address(f"{key}/03.tar"), size=8)


@pytest.mark.parametrize("kind", STORES)
def test_weights_are_read_in_ranges(servers, key, kind, tmp_path, monkeypatch):
    """The values of a local file; of a few rows, a few bytes are read. A cut or replaced object is an error."""
    monkeypatch.setattr(bucket_module, "_RANGE_BYTES", 1000)
    objects = bucket(servers[kind], key)
    path = tmp_path / "model.safetensors"
    values = {
        "one": np.arange(30_000, dtype=np.float32).reshape(300, 100),
        "two": np.ones(7, np.float16),
        "empty": np.ones((0, 4), np.float32),
    }
    write_safetensors(path, values, iter(values.values()), {"format": "pt"})
    objects.write(path.name, path.read_bytes())
    before = bytes_read()
    with SafetensorsFile(BucketBytes(objects, path.name)) as file, SafetensorsFile(path) as local:
        assert (file.tensors, file.metadata) == (local.tensors, local.metadata)
        few = StoredTensor(file, "one").rows(100, 103, 100, np.empty(1200, np.uint8))
        np.testing.assert_array_equal(few, values["one"][100:103])
        assert bytes_read() - before < 2000
        assert not StoredTensor(file, "empty").rows(0, 0, 4, np.empty(0, np.uint8)).size
        rows = StoredTensor(file, "one").rows(0, 300, 100, np.empty(120_000, np.uint8))
        np.testing.assert_array_equal(rows, values["one"])
        objects.write(path.name, path.read_bytes()[:-1] + b"!")
        with pytest.raises(CheckpointError, match="was replaced while it was read"):
            StoredTensor(file, "two").rows(0, 1, 7, np.empty(14, np.uint8))
    objects.write(path.name, path.read_bytes()[:-1])
    with (
        SafetensorsFile(BucketBytes(objects, path.name)) as file,
        pytest.raises(CheckpointError, match="before the end of its tensors"),
    ):
        StoredTensor(file, "two").rows(0, 1, 7, np.empty(14, np.uint8))
    for content in (b"", b"\0" * 8, b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]"):
        objects.write(path.name, content)
        with pytest.raises(DamagedBytesError):
            BucketBytes(objects, path.name)
    with pytest.raises(FileNotFoundError):
        BucketBytes(objects, "other.safetensors")


def test_a_file_that_few_read_is_fetched_where_it_is_read(s3, key):
    """Beside the files of a mirror that uploads; a later pull of the others leaves it, and one that is here stays."""
    objects = bucket(s3, key)
    objects.write("plan.txt", b"plan")
    objects.write("reference/a.npz", b"a")
    objects.write("reference/module.py", b"")
    run_dir = RunDir(locate(s3.address(key)))
    files = sorted(path.name for path in run_dir.path.rglob("*") if path.is_file())
    assert files == ["module.py", "plan.txt"]
    with run_dir.mirror.uploads(1, lambda name: True, lambda: None, print):
        assert (run_dir.fetch_reference() / "a.npz").read_bytes() == b"a"
    (run_dir.path / "reference" / "a.npz").write_bytes(b"changed")
    run_dir.mirror.pull(lambda name: name == "plan.txt")
    assert (run_dir.fetch_reference() / "a.npz").read_bytes() == b"changed"


LEAVE_FILES = """
import os, sys
from spmd.storage.address import locate
from spmd.storage.bucket import Bucket
from spmd.storage.mirror import Mirror

mirror = Mirror(Bucket(locate("s3://bucket/run")))
print(mirror.folder, flush=True)
sys.stdin.read()
"""


def test_files_of_a_killed_process_are_removed(tmp_path, monkeypatch):
    """By the next one on this machine, once it is killed, and not before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", LEAVE_FILES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as process:
        folder = Path(process.stdout.readline().decode().strip())
        (folder / "metrics.jsonl").write_text("1")
        Mirror(Bucket(locate("s3://bucket/run")))
        assert (folder / "metrics.jsonl").exists()
        process.kill()
    mirror = Mirror(Bucket(locate("s3://bucket/run")))
    assert not folder.exists()
    assert {path.stem for path in tmp_path.iterdir()} == {mirror.folder.name}


def test_programs_are_shared_through_a_bucket(s3, key, tmp_path, monkeypatch):
    """What process 0 of one host has compiled, another finds; JAX writes to a folder of the process alone."""
    objects = bucket(s3, key)
    address = s3.address(key)
    with monkeypatch.context() as other:
        other.setattr(jax, "process_index", lambda: 1)
        with program_cache(address, print):
            file = Path(jax.config.values["jax_compilation_cache_dir"]) / "jit_step-1-cache"
            file.write_bytes(b"of process 1")
    assert not objects.list()
    folders = []
    for host in ("first", "second"):
        monkeypatch.setenv("HOME", str(tmp_path / host))
        with program_cache(address, print):
            folder = Path(jax.config.values["jax_compilation_cache_dir"])
            folders.append(folder)
            if host == "first":
                (folder / "jit_step-1-cache").write_bytes(b"program")
                (folder / "jit_step-1-atime").write_bytes(b"0")
            else:
                assert (folder / "jit_step-1-cache").read_bytes() == b"program"
        (name,) = objects.list()
        assert name.startswith(f"jax-{jax.__version__}-cpu-")
        assert name.endswith("/jit_step-1-cache")
        assert not folder.exists()
    assert folders[0] != folders[1]
    assert jax.config.values["jax_compilation_cache_dir"] != str(folders[1])


def test_a_program_has_one_name_on_all_hosts(s3, key, tmp_path, monkeypatch):
    """JAX writes it into a folder of the process, which is no part of its name: another process reads it."""
    minimum = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[minimum]
    jax.config.update(minimum, 0.0)
    x, names = jnp.arange(3.0), []
    try:
        for host in ("first", "second"):
            monkeypatch.setenv("HOME", str(tmp_path / host))
            with program_cache(s3.address(key), print), watch_cache_hits() as hits:
                jax.jit(lambda x: jnp.sin(x) * 3)(x).block_until_ready()
            names.append(bucket(s3, key).list())
            assert bool(hits) is (host == "second")
    finally:
        jax.config.update(minimum, before)
    assert len(names[0]) == 1
    assert names[0] == names[1]


def test_a_program_that_is_being_written_waits(s3, key, tmp_path, monkeypatch):
    """Until it has kept its size from one look to the next; a thread looks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(program_cache_module, "_INTERVAL", 0.02)
    objects = bucket(s3, key)
    programs = BucketPrograms(locate(s3.address(key)), print)
    programs.download()
    file = programs.folder / "jit_step-1-cache"
    file.write_bytes(b"half")
    programs.upload()
    file.write_bytes(b"whole program")
    programs.upload()
    assert not objects.list()
    with programs.uploads():
        deadline = time.monotonic() + 30
        while not objects.list():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert objects.read(file.name) == b"whole program"


def test_without_a_store_programs_are_compiled(s3, key, tmp_path, monkeypatch):
    """It is said; where the bucket does not exist, it is a problem before a run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(program_cache_module, "_PATIENCE", 0.1)
    said = []
    with FaultProxy(s3, "cut") as proxy:
        address = s3.through(proxy, key)
        assert not cache_problems(address)
        with program_cache(address, said.append):
            pass
    assert "programs are compiled, not read" in said[-1]
    (problem,) = cache_problems("s3://no-such-bucket/programs")
    assert "does not exist" in problem.what
    assert not cache_problems(s3.address(key))
    assert not cache_problems("none")


def test_a_config_in_a_bucket_has_the_modules_beside_it(s3, key, tmp_path, monkeypatch):
    """And packages, but neither other files nor another run's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    objects = bucket(s3, key)
    names = ["config.py", "helper.py", "package/__init__.py", "package/a/b.py", "parts/model.py"]
    for name in (*names, "runs/demo/config.py", "corpus.txt"):
        objects.write(name, b"")
    address = s3.address(f"{key}/config.py")
    file = find_file(address)
    files = [path for path in file.parent.rglob("*") if path.suffix == ".py"]
    assert sorted(path.relative_to(file.parent).as_posix() for path in files) == names
    assert local_target(f"{address}:make") == f"{file}:make"
    for name, expected in (("other.py", "does not exist"), ("config", "config/config.py")):
        with pytest.raises(ConfigError, match=expected):
            find_file(s3.address(f"{key}/{name}"))
    at_the_top = s3.address("top.py")
    Bucket(locate(at_the_top).parent).write("top.py", b"")
    assert find_file(at_the_top).name == "top.py"


def test_of_two_mirrors_that_write_a_file_one_is_refused(s3, key):
    objects = bucket(s3, key)
    first, second = Mirror(objects), Mirror(objects)
    for number, mirror in enumerate((first, second)):
        (mirror.folder / "plan.txt").write_text(f"of {number}")
    first.push()
    with pytest.raises(StorageError, match="was written by another process"):
        second.push()
    assert objects.read("plan.txt") == b"of 0"


def test_metrics_that_a_lost_process_had_not_uploaded_are_restored(s3, key):
    """Those of a copy in memory: whatever is in the bucket, the file ends as at the copy, or later."""
    run_dir = RunDir(locate(s3.address(key)))
    mirror = Mirror(run_dir.mirror.bucket)
    metrics = mirror.folder / METRICS
    assert mirror.pending(METRICS) == (0, b"")
    metrics.write_bytes(b"1\n2\n")
    assert mirror.pending(METRICS) == (0, b"1\n2\n")
    mirror.push()
    with metrics.open("ab") as file:
        file.write(b"3\n")
    position, lines = mirror.pending(METRICS)
    assert (position, lines) == (4, b"3\n")
    copy = {"position": position, "lines": lines.decode()}
    for in_bucket, expected in ((b"1\n2\n", b"1\n2\n3\n"), (b"1\n2\n3\n4\n", b"1\n2\n3\n4\n")):
        run_dir.metrics.write_bytes(in_bucket)
        run_dir.restore_metrics(None)
        assert run_dir.metrics.read_bytes() == in_bucket  # the control
        run_dir.restore_metrics(copy)
        assert run_dir.metrics.read_bytes() == expected
    metrics.write_bytes(b"5\n6\n7\n")
    assert mirror.pending(METRICS) == (0, b"5\n6\n7\n")


@pytest.mark.soak
def test_uploads_go_on_after_an_outage(s3, key, monkeypatch):
    monkeypatch.setattr(mirror_module, "INTERVAL", 0.05)
    said = []
    with FaultProxy(s3) as proxy:
        mirror = Mirror(Bucket(locate(s3.through(proxy, key)), patience=0.5))
        with mirror.uploads(1, lambda name: True, lambda: None, said.append):
            proxy.fault = "cut"
            (mirror.folder / "metrics.jsonl").write_text("1\n")
            while not said:
                time.sleep(0.05)
            assert not bucket(s3, key).list()
            proxy.fault = "none"
    assert bucket(s3, key).read("metrics.jsonl") == b"1\n"
    assert "does not answer" in said[0]
    assert "answers again" in said[-1]


def test_one_run_holds_the_lease_of_a_bucket(store, key, capsys, monkeypatch):
    run = locate(store.address(key))
    with Lease(run) as held:
        held.renew()
        with pytest.raises(CheckpointError, match="writes to it"), Lease(run):
            pass
    assert Bucket(run).list() == ["lease/1.released"]
    monkeypatch.setattr(lease_module, "HEARTBEAT", 0.05)
    codes = []
    with Lease(run, exit_process=codes.append) as old, Lease(run, take_over=True) as new:
        with pytest.raises(CheckpointError, match="its lease was taken over by"):
            old.renew()
        while not codes:
            time.sleep(0.01)
        new.renew()
    assert codes == [EXIT_LOST]
    assert "lost to another process" in capsys.readouterr().err
    assert Bucket(run).list() == ["lease/3.released"]


def test_a_run_that_waited_for_the_lease_has_the_files_of_the_one_before(s3, key):
    """Its folder was read before that one wrote its last lines; control: the lines are not there before the lease."""
    folder = RunDir(locate(s3.address(key)))
    objects = bucket(s3, key)
    objects.write("metrics.jsonl", b'{"step": 1}\n')
    objects.write("checkpoints/steps/1.json", b"")
    assert folder.check_use("auto")
    objects.write("metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')
    assert folder.metrics.read_bytes() == b'{"step": 1}\n'
    with folder.lease(resume=True, take_over=False):
        assert folder.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_heartbeats_of_several_threads_are_of_one_holder(store, key):
    """Saves, uploads and the thread that renews the lease do it at the same time."""
    with Lease(locate(store.address(key)), exit_process=lambda code: None) as lease:
        failed = []

        def renew():
            for _ in range(20):
                try:
                    lease.renew()
                except CheckpointError as error:
                    failed.append(error)

        threads = [threading.Thread(target=renew) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_a_lease_in_a_bucket_expires_by_the_stores_clock(store, key, monkeypatch):
    """A holder elsewhere that stopped is replaced; one that beats keeps it, whatever this host's clock says."""
    run = locate(store.address(key))
    objects = Bucket(run)
    holder = {"host": "elsewhere", "pid": 7, "since": "", "machine": "another", "started": "1"}

    def write(age):
        text = json.dumps({**holder, "beat": objects.now() - age})
        objects.write("lease/3.json", text.encode())

    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 86400)
    write(lease_module.EXPIRY + 1)
    began = time.monotonic()
    with Lease(run, say=lambda line: None) as lease:
        assert lease.number == 4
    assert time.monotonic() - began < 10
    objects.delete("lease/4.released")
    write(5)
    timer = threading.Timer(1.0, write, [0])
    timer.start()
    with (
        pytest.raises(CheckpointError, match="process 7 on elsewhere"),
        Lease(run, say=lambda line: None),
    ):
        pass
    timer.join()


def test_a_lease_that_cannot_be_read_is_not_taken(s3, key):
    """The control takes one whose heartbeat has expired."""
    holder = {"host": "elsewhere", "pid": 7, "since": "", "machine": "another", "started": "1"}
    objects = bucket(s3, key)
    objects.write("lease/3.json", json.dumps({**holder, "beat": objects.now()}).encode())
    with FaultProxy(s3, "deny") as proxy:
        files = lease_files.BucketLeaseFiles(Bucket(locate(s3.through(proxy, key))))
        with pytest.raises(StorageError, match="access is refused"):
            files.last_beat(lease_files.LeaseName(3))
    assert lease_files.BucketLeaseFiles(objects).last_beat(lease_files.LeaseName(3)) > 0


def test_of_several_claims_one_holds_the_lease(store, key):
    for number in range(5):
        run = locate(store.address(f"{key}/{number}"))

        def claim(objects, name, data, run=run):
            return not Lease(run, say=lambda line: None)._problems()

        assert race(None, "", claim, claimants=4) == 1


def make_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_state(mesh, seed=0):
    rng = np.random.default_rng(seed)

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {
        "params": {
            "kernel": place(rng.normal(size=(8, 16)).astype(np.float32), "fsdp", "tensor"),
            "bias": place(jnp.arange(4.0), "tensor"),
            "scale": place(jnp.asarray(rng.normal(size=8), jnp.bfloat16), "fsdp"),
        },
        "codes": place(jnp.arange(8).astype(jnp.uint4), "fsdp"),
        "exponents": place(jnp.ones(8, jnp.float8_e8m0fnu)),
        "mask": place(jnp.arange(8) % 3 == 0),
        "step": place(jnp.int32(3)),
        "key": jax.random.key(seed),
    }


def abstract(state, mesh):
    whole = NamedSharding(mesh, P())

    def leaf(x):
        sharding = whole
        if x.ndim == 2:
            sharding = NamedSharding(mesh, P(None, mesh.axis_names))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, state)


def same(a, b):
    def bits(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    return jax.tree.all(jax.tree.map(lambda x, y: bits(x) == bits(y), a, b))


@pytest.fixture(scope="module")
def state():
    return make_state(make_mesh(fsdp=4, tensor=2))


@pytest.mark.parametrize("kind", STORES)
def test_a_state_comes_back_bitwise_on_any_mesh(servers, key, kind, state, monkeypatch):
    """Also in parts of shards, if a chunk would be too large, and in dtypes that zarr does not name."""
    monkeypatch.setattr(zarr_arrays, "MOST_CHUNK_BYTES", 32)
    directory = servers[kind].address(f"{key}/checkpoints")
    with CheckpointManager(directory, max_to_keep=2, keep_best=1, owner=1) as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            checkpoints.save(step, state, {"seed": step}, {"val_loss": loss})
            checkpoints.wait()
        assert checkpoints.steps() == (1, 2, 3)
        with pytest.raises(CheckpointError, match="exists already"):
            checkpoints.save(3, state)
    objects = bucket(servers[kind], key)
    chunks = [name for name in objects.list("checkpoints/state/3.1/params/kernel/c/")]
    assert len(chunks) == 16
    assert not objects.list("checkpoints/state/0.1/")
    for mesh in (make_mesh(data=8), make_mesh(x=2, y=4)):
        with CheckpointManager(directory, read_only=True) as checkpoints:
            assert checkpoints.best() == 1
            restored, record = checkpoints.restore(None, abstract(state, mesh))
        assert record == {"seed": 3}
        assert same(restored, state)


def test_what_does_not_fit_is_said_whole(s3, key, state):
    directory = s3.address(key)
    with CheckpointManager(directory, owner=1) as checkpoints:
        checkpoints.save(1, state)
        wanted = abstract(state, make_mesh(data=8))
        wanted["more"] = wanted.pop("mask")
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(1, wanted)
    assert len(caught.value.problems) == 2
    assert "missing: the state has it" in str(caught.value)


def test_a_refused_request_is_no_damage(s3, key, state):
    """The checkpoint is not set aside: the next process may have credentials."""
    with FaultProxy(s3) as proxy:
        directory = s3.through(proxy, key)
        with CheckpointManager(directory, owner=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state, {"seed": step})
            wanted = abstract(state, make_mesh(data=8))
            checkpoints.wait()
            proxy.fault, proxy.skip = "deny", 3
            with pytest.raises(CheckpointError, match="reading the checkpoint failed"):
                checkpoints.restore(None, wanted)
            proxy.fault = "none"
            assert not checkpoints.damaged
            _, record = checkpoints.restore(None, wanted)
            assert record == {"seed": 2}


@pytest.mark.parametrize("damage", ["chunk", "missing", "manifest", "renamed"])
def test_a_damaged_checkpoint_is_not_used(s3, key, state, damage):
    """The one before it is; the next save gives the damaged manifest another name."""
    directory = s3.address(key)
    objects = bucket(s3, key)
    with CheckpointManager(directory, owner=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {"seed": step})
    chunk = "state/2.1/params/kernel/c/1/0"
    data = bytearray(objects.read(chunk))
    data[5] ^= 1
    if damage == "chunk":
        objects.write(chunk, bytes(data))
    elif damage == "missing":
        objects.delete(chunk)
    elif damage == "manifest":
        text = objects.read("steps/2.json").replace(b'"seed": 2', b'"seed": 3')
        objects.write("steps/2.json", text)
    else:
        objects.write("steps/2.json", objects.read("steps/1.json"))
    with CheckpointManager(directory, owner=2) as checkpoints:
        restored, record = checkpoints.restore(None, abstract(state, make_mesh(data=8)))
        assert record == {"seed": 1}
        assert same(restored, state)
        assert list(checkpoints.damaged) == [2]
        with pytest.raises(CheckpointError, match="checkpoint 2 is damaged"):
            checkpoints.restore(2, abstract(state, make_mesh(data=8)))
        checkpoints.save(2, state, {"seed": 4})
        assert checkpoints.record(2) == {"seed": 4}
    assert objects.list("damaged/") == ["damaged/2.json"]


def test_leftovers_of_interrupted_saves_are_removed(s3, key, state):
    """A mark without the manifest of its lease; that of a run with a later lease stays."""
    directory = s3.address(key)
    objects = bucket(s3, key)
    with CheckpointManager(directory, owner=3) as checkpoints:
        checkpoints.save(1, state)
    for name in ("state/2.3/a/c/0", "state/7.5/a/c/0"):
        objects.write(name, b"")
    for name in ("steps/1.3.saving", "steps/2.3.saving", "steps/7.5.saving"):
        objects.write(name, b"")
    with CheckpointManager(directory, owner=4) as checkpoints:
        assert checkpoints.leftovers == ("1.3.saving", "2.3.saving")
        assert checkpoints.latest_valid() == 1
    assert objects.list("steps/") == ["steps/1.json", "steps/7.5.saving"]
    assert not objects.list("state/2.3/")
    assert objects.list("state/7.5/")


def test_the_later_lease_wins_a_step(s3, key, state):
    """Of two runs that save the same step, the one with the lower number is refused, whoever comes first."""
    directory = s3.address(key)
    with CheckpointManager(directory, owner=1) as old, CheckpointManager(directory, owner=2) as new:
        old.save(1, state, {"of": 1})
        old.wait()
        new.save(1, state, {"of": 2})
        new.wait()
        old._metrics.clear()
        old.save(1, state, {"of": 1})
        with pytest.raises(CheckpointError, match="was saved by the run with lease 2"):
            old.wait()
        assert new.record(1) == {"of": 2}
        assert new.latest_valid() == 1


def test_bytes_and_requests_of_a_save(s3, key):
    """One object a chunk and one of metadata an array, and a few for the commit; 1.01 of the state's bytes."""
    mesh = make_mesh(fsdp=8)
    whole = NamedSharding(mesh, P("fsdp"))
    state = {f"w{n}": jax.device_put(jnp.ones((8, 4096)), whole) for n in range(4)}
    with FaultProxy(s3) as proxy:
        directory = s3.through(proxy, key)
        with CheckpointManager(directory, owner=1) as checkpoints:
            before = proxy.requests
            checkpoints.save(1, state)
            checkpoints.wait()
            requests = proxy.requests - before
    chunks, arrays = 32, 4
    assert requests - chunks - arrays <= 8
    objects = bucket(s3, key)
    stored = sum(len(objects.read(name)) for name in objects.list())
    size = sum(x.nbytes for x in state.values())
    assert size <= stored <= 1.02 * size + 4096
