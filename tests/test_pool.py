"""The pool on a real Redis server: the conformance suite, plain and encrypted, and what only a pool does."""

import secrets
import subprocess
import sys
import time

import pytest
import torch

from agentmem._lmdb import Cipher
from agentmem.config import Config
from agentmem.errors import InvalidInputError, TierUnavailableError
from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.record import pack, read_meta
from agentmem.stats import Counters
from agentmem.testing.proxy import proxied
from agentmem.testing.record_tier_suite import RecordTierSuite, holds
from agentmem.testing.redisprocess import RedisProcess, is_installed
from agentmem.testing.tier_suite import make_record
from agentmem.tiers.lossy import LossyTier
from agentmem.tiers.pool import PoolTier
from agentmem.tiers.redisserver import Patience, RedisServer, without_password

pytestmark = pytest.mark.skipif(not is_installed(), reason="redis-server is not installed")

SHORT = Patience(connect_s=1.0, idle_s=2.0)


def big_record(seed):
    """Pack 512 KiB that do not compress."""
    generator = torch.Generator().manual_seed(seed)
    sections = [torch.randn((2, 4, 64, 128), generator=generator) for _ in range(2)]
    return pack(
        sections, block_hash=BlockHash(bytes([seed]) * 32), fingerprint=Fingerprint(bytes(32)), start=0, codec="raw"
    )


@pytest.fixture(scope="module")
def server_process(tmp_path_factory):
    directory = tmp_path_factory.mktemp("redis")
    process = RedisProcess(directory, "--unixsocket", str(directory / "socket"))
    yield process
    process.kill()


@pytest.fixture
def raw(server_process):
    """The server, emptied, to look behind the tier's back."""
    server = RedisServer(f"redis://127.0.0.1:{server_process.port}", patience=SHORT)
    server.run([("FLUSHALL",)], nbytes=0)
    yield server
    server.close()


def say(raw, *command):
    """Send one command and return the answer."""
    return raw.run([command], nbytes=1 << 20)[0]


@pytest.fixture
def open_pool(raw):
    pools = []

    def open_one(**options):
        pools.append(PoolTier(f"redis://{raw.where.partition('://')[2]}", **options))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


class TestPool(RecordTierSuite):
    """The pool of a plain store, over TCP."""

    cipher = None

    @pytest.fixture(autouse=True)
    def _server(self, raw):
        self.raw = raw
        self.url = raw.where

    def open_place(self, path):
        yield lambda: PoolTier(self.url, cipher=self.cipher, patience=SHORT)

    def damage(self, tier, digest):
        key = tier._record_key(digest)
        value = bytearray(say(self.raw, "GET", key))
        value[len(value) // 2] ^= 1
        say(self.raw, "SET", key, bytes(value))

    def open_unreachable(self):
        return PoolTier("redis://127.0.0.1:1", cipher=self.cipher, patience=SHORT)


class TestEncryptedPool(TestPool):
    """The pool of an encrypted store."""

    cipher = Cipher(bytes(range(32)))


class TestPoolOverAUnixSocket(TestPool):
    """The pool of a plain store on the same machine."""

    @pytest.fixture(autouse=True)
    def _server(self, raw, server_process):
        self.raw = raw
        self.url = f"unix://{server_process._directory}/socket"


@pytest.mark.usefixtures("raw")
def test_a_hundred_blocks_take_a_few_round_trips(server_process):
    records = [make_record(seed) for seed in range(1, 101)]
    with proxied(server_process.port) as proxy:
        proxy.delay_s = 0.05  # a hundred round trips would take 5 s
        pool = PoolTier(f"redis://127.0.0.1:{proxy.port}", patience=SHORT)
        stored = pool.put_many(records)

        start_s = time.monotonic()
        fetched = pool.fetch_many([record.digest for record in records])
        found = pool.find_many([record.block_hash for record in records])
        elapsed_s = time.monotonic() - start_s
        pool.close()

    assert stored == [True] * 100
    assert fetched == [record.data for record in records]
    assert found == [record.digest for record in records]
    assert elapsed_s < 2.0


def test_more_than_a_batch_comes_back_byte_for_byte(open_pool):
    records = [big_record(seed) for seed in range(40)]  # 20 MiB
    pool = open_pool()

    assert pool.put_many(records) == [True] * 40
    assert pool.fetch_many([record.digest for record in records]) == [record.data for record in records]


def test_every_key_expires_and_use_puts_that_off(open_pool, raw):
    pool = open_pool(residency_s=1000)
    record = make_record(1)
    pool.put_many([record])
    keys = [pool._record_key(record.digest), pool._name_key(record.block_hash)]

    assert all(900 < say(raw, "TTL", key) <= 1000 for key in keys)
    for use in (
        lambda: pool.contains_many([record.digest]),
        lambda: pool.fetch_many([record.digest]),
        lambda: pool.put_many([record]),
        lambda: pool.find_many([record.block_hash]),
    ):
        say(raw, "EXPIRE", keys[0], 10)
        use()
        assert say(raw, "TTL", keys[0]) > 900
    assert say(raw, "DBSIZE") == 2


def test_a_block_that_is_here_is_not_sent_again(open_pool):
    counters = Counters()
    record = big_record(1)
    open_pool().put_many([record])

    assert open_pool(counters=counters).put_many([record, make_record(2)]) == [True, True]
    assert counters.snapshot()["pool_stored_nbytes"] == len(make_record(2).data)


def test_another_block_of_the_same_tokens_takes_over_their_name(open_pool):
    pool = open_pool()
    one, other = make_record(1, name=7), make_record(2, name=7)
    pool.put_many([one, other])
    pool.remove_many([other.digest])

    pool.put_many([one])

    assert pool.find_many([one.block_hash]) == [one.digest]


def test_an_encrypted_pool_tells_neither_names_nor_bytes_and_other_keys_find_nothing(open_pool, raw):
    record = make_record(1)
    pool, other = (open_pool(cipher=Cipher(secrets.token_bytes(32))) for _ in range(2))
    pool.put_many([record])
    keys = [pool._record_key(record.digest), pool._name_key(record.block_hash)]
    kept = b"".join(key + say(raw, "GET", key) for key in keys)

    for secret in (record.digest, record.block_hash, record.data[64:128]):
        assert secret not in kept
        assert secret.hex().encode() not in kept
    assert other.contains_many([record.digest]) == [False]
    assert other.find_many([record.block_hash]) == [None]
    assert holds(pool, record)


def test_a_password_comes_from_the_url_or_the_environment_and_no_message_has_it(raw, server_process, monkeypatch):
    say(raw, "CONFIG", "SET", "requirepass", "the secret")
    where = f"127.0.0.1:{server_process.port}"
    try:
        with_password = PoolTier(f"redis://:the%20secret@{where}")
        with pytest.raises(TierUnavailableError, match="refuses the user or password") as without:
            PoolTier(f"redis://{where}").put_many([make_record(1)])
        with pytest.raises(TierUnavailableError, match="refuses the user or password") as wrong:
            PoolTier(f"redis://default:guessed@{where}").put_many([make_record(1)])
        monkeypatch.setenv("REDISCLI_AUTH", "the secret")
        from_environment = PoolTier(f"redis://{where}")

        assert with_password.put_many([make_record(1)]) == [True]
        assert holds(from_environment, make_record(1))
        assert not any("secret" in str(each.value) or "guessed" in str(each.value) for each in (without, wrong))
    finally:
        say(raw, "CONFIG", "SET", "requirepass", "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/2", "redis://host:1/2"),
        ("rediss://me:secret@host?ssl_ca_certs=x", "rediss://host"),
        ("unix://:secret@/run/x.sock?db=1", "unix:///run/x.sock"),
        ("redis://:sec/r@et@host", "redis://host"),
        ("redis://host?password=sec@ret", "redis://..."),
    ],
)
def test_a_url_is_printed_without_its_password(url, shown):
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://:secret@host", "redis://, rediss:// or unix://"),
        ("host:6379", "redis://, rediss:// or unix://"),
        ("redis://:secret@host?colour=blue", "colour"),
        ("redis://:secret@host?socket_timeout=blue", "socket_timeout"),
        ("redis://:secret@host:port", "cannot be"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_when_it_is_given(url, message):
    with pytest.raises(InvalidInputError, match=message) as refused:
        PoolTier(url)

    assert "secret" not in str(refused.value)


def test_the_configuration_takes_a_pools_url_and_never_prints_it():
    config = Config(pool="rediss://me:secret@host")

    assert "secret" not in repr(config)
    for url in ("http://me:secret@host", "me:secret@host", ""):
        with pytest.raises(InvalidInputError, match=r"Config\.pool must be a redis://") as refused:
            Config(pool=url)
        assert "secret" not in str(refused.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    code = "import sys; sys.modules['redis'] = None; import agentmem.tiers.pool"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "InvalidInputError: a pool needs the package `redis`: pip install 'agentmem-kv[pool]'" in done.stderr


def test_the_server_says_how_much_memory_it_uses(open_pool):
    pool = open_pool()
    before = pool.usage()
    pool.put_many([big_record(seed) for seed in range(10)])

    assert pool.usage().used_nbytes - before.used_nbytes > 5_000_000
    assert before.max_nbytes is None


def certificate(directory):
    """Write a certificate of its own for localhost and its key; return both paths."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir()
    paths = directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return paths


def test_tls_is_spoken_with_a_server_whose_certificate_is_known_and_with_no_other(tmp_path):
    cert, key = certificate(tmp_path / "tls")
    options = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    process = RedisProcess(tmp_path / "redis", *options, "--tls-ca-cert-file", str(cert), has_tls=True)
    url = f"rediss://localhost:{process.tls_port}"
    records = [big_record(seed) for seed in range(4)]
    try:
        pool = PoolTier(f"{url}?ssl_ca_certs={cert}")

        assert pool.put_many(records) == [True] * 4
        assert pool.fetch_many([record.digest for record in records]) == [record.data for record in records]
        with pytest.raises(TierUnavailableError, match="certificate"):
            PoolTier(url).put_many(records)
        pool.close()
    finally:
        process.kill()


@pytest.mark.parametrize("cipher", [None, Cipher(bytes(range(32)))], ids=["plain", "encrypted"])
def test_a_pool_keeps_lossy_and_exact_forms_of_a_block_side_by_side(open_pool, cipher):
    sections = [torch.randn((2, 4, 64, 32), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    names = {"block_hash": BlockHash(b"b" * 32), "fingerprint": Fingerprint(bytes(32)), "start": 64}
    record = pack(sections, **names)
    lossy = LossyTier(open_pool(cipher=cipher), "q2")
    exact = open_pool(cipher=cipher)

    lossy.put_many([record])
    before = exact.fetch_many([record.digest]), exact.find_many([record.block_hash])
    [data] = LossyTier(open_pool(cipher=cipher), "q2").fetch_many([record.digest])
    exact.put_many([record])

    meta = read_meta(data)
    assert before == ([None], [None])
    assert (meta.is_lossy, meta.origin) == (True, record.digest)
    assert len(data) < len(record.data) / 4
    assert exact.fetch_many([record.digest]) == lossy.fetch_many([record.digest]) == [record.data]
