"""The page on troubleshooting and the product's errors and warnings say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.error_texts import Said, of_code, of_product, strings_of_product

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()

# The lines that the page quotes: its headings in code, and the list items that begin with code.
LINES = re.findall(r"^(?:### |- )`([^`]*)`", PAGE, re.MULTILINE)

# Parts of texts that explain themselves: each says what failed and what to do, or what is allowed.
EXPLAINS_ITSELF = (
    "others changed '…' throughout … s, so that nothing was changed",
    "others change the round document again and again",
    "others change the list of excluded hosts again and again",
    "option 'outage_limit'",
    "'…' is no fence, for it holds other data: a fence is a file of its own, beside the checkpoint",
    # The members of a quorum.
    "is full: its members hold up to 32 MiB each; delete runs that are over, with rdzv clean",
    "so whether this client did is unknown",
    "has another secret than this one, so it takes no part: give all nodes the same",
    "…: name others with ports=..., or in the endpoint",
    # The command line and the options.
    "--warm has no effect with --no-python, --run-path, --standalone and torch's backends",
    "step() and saved() cannot tell the agent anything (…)",
    "LOCAL_RANK=…, LOCAL_WORLD_SIZE=…",
    "process … tells the steps of this rank",
    "… is not of round …",
    "after … s it is unknown whether all ranks save at step …",
    "this node leaves once all ranks have saved, in … s at the latest; again ends it at once",
    "--rdzv-id is empty: give the run an id",
    "--rdzv-id …: ids that begin with '…' are reserved for what rdzv-plugins keeps",
    "--rdzv-id …: control characters, and bytes that are no UTF-8, are not allowed",
    "--rdzv-id …: … bytes, at most … are allowed",
    "so that the workers cannot start: use another id, or --log-dir=/dev/null",
    "--nnodes '…' is neither N nor MIN:MAX, with 1 <= MIN <= MAX",
    "--peers: '…' is neither host nor host:port",
    "--rdzv-conf: the option '…' has no value",
    "--rdzv-conf: the option '…' is given twice",
    "'…' is none of …",
    "run '…' has no history: no round of it has run yet, or it has history_ttl=0",
    "run '…' is of handler=torch: no order reaches it, and no history",
    "run '…' is closed",
    "run '…' is dead, and nobody carries an order out: …; its id is free after …",
    "run '…' ended meanwhile",
    "run '…' was closed meanwhile: …",
    "run '…' died meanwhile: …",
    "run '…' has no node of rank … now: …",
    "fewer than a round needs; nothing was changed. --force does it all the same",
    "run '…' has no node '…': …",
    "no run '…' is known at …: is the id right…?",
    "… runs have a store at …: name one with -i",
    "run '…' is about to end: the workers of … succeeded, and would run again",
    "--why: longer than … characters",
    "--for: '…' is no time such as 90s, 30m, 1h or 2d, up to 365d",
    "name a run, or all with --all-runs",
    "name a node, or the --rank of one",
    "name a node, or a host: all its nodes",
    "name a run, as RUN, with -i or in $RDZV_ID",
    "name a run and a host, or --all-runs and a host",
    "two runs, '…' and '…': name one",
    "is not excluded from …: see …",
    "name a run, or all dead runs with --dead",
    "this installation has no built pages; in a checkout, make docs builds them",
    "there is no page '…'; …",
    "run '…' is of handler=torch and may be live: use --force",
    "run '…' has live nodes: …; …, or use --force",
    "…; --force deletes it all the same",
    "option '…' is one of torch's etcd backends; write here: …",
    "option '…' has no default: set it in --rdzv-conf",
    "option '…' is a secret: other users of the host can read --rdzv-conf. Set $… instead",
    "option '…': … must be at least … and below 1e9",
    "option '…': … is not one of: …",
    "option '…': … is neither true nor false",
    "option '…': … is not a valid …",
    "option 'metrics_port': '…' must be at most …",
    "option 'network': '…' is no network such as 10.1.0.0/16",
    "option 'master_port': '…' is no range such as 30000-30999, up to …",
    "option 'master_port': '…' has less than … ports: MASTER_PORT, that of the round before, and",
    "for the network check (…): name more, or end what listens there",
    "option 'domain': '…' must have 1 to … characters, as in rack7 or spine1/rack7",
    "option 'domain': … must have neither spaces nor $(...); is a variable not set?",
    "--nnodes=…:… allows no multiple of … nodes, as …: change one of them",
    "needs the domain of this node, which neither Slurm nor NVML tells: set domain=... or",
    "rank_order=topology, but nobody knows the domain of this node; its rank follows those of all",
    "option 'check_command': '…' names no program",
    "option 'check_command': '…' is no command (…)",
    "there is no check '…'; …",
    "option 'prefix': '…' must not be empty, start or end with '/', or contain '//'",
    "is a run under another prefix; take another run id, or prefix",
    "option 'poll_interval_max' is less than 'poll_interval_min'",
    "option 'table': '…' is not a name or schema.name",
    "option 'sasl': true needs",
    "options 'cert_file' and 'key_file' must be set together",
    "user and password ($RDZV_PLUGINS_PASSWORD) must be set together",
    "option 'sentinel_…' needs sentinel=<name>",
    "… and … are both set: leave one of them out",
    "the password ($RDZV_PLUGINS_PASSWORD) needs a user: set one with user=",
    "a user is for HTTP basic authentication, which needs a token besides",
    "sentinel= and cluster=true are two ways to find a primary: set one",
    "a Redis Cluster has the database 0 only: leave out …",
    "option '…' is not for a unix:// endpoint: leave it out",
    "option '…': nothing would be encrypted; …",
    # $RDZV_PLUGINS_X is no option and has no effect; did you mean $RDZV_PLUGINS_Y?
    "run '…': …; …",
    "tls=true, but sslmode=… in the endpoint does without TLS: leave one of them out",
    "option '…' is torch's name of '…', and the two differ: leave '…' out",
    "… '…' cannot be read (…)",
    "… '…' has no first line: write the secret there",
    "_file '…' cannot be used: …",
    "cert_file '…' with key_file '…' cannot be used: …",
    "handler=torch has no …; leave out, or use handler=rdzv",
    "need a later torch, or handler=rdzv",
    "handler=torch unpickles what stands in the store: whoever can write there runs code on this",
    "cannot listen at …:… (…); choose another --port",
    "is loopback, but the store is on another host: other hosts cannot reach this one. Name an",
    "this host is none of …: run it on one of them, or name the address",
    "whose death costs the run a restart: name three hosts to survive that of any",
    "option 'ports': '…' is no range such as 29600-29699",
    "each run has members of its own: name the run with -i, or, where a command takes no run, with",
    # The endpoint.
    "--local-addr=… … no address of this host: name one of its own",
    "members have no users: leave out what stands before the '@'",
    "the endpoint names … hosts: name one, three or five of the run's.",
    "the endpoint names a host twice: each member needs a host of its own",
    "the endpoint '…' ",
    "the endpoint has a path, '…': leave it out",
    "the endpoint has an unknown parameter '…'; …",
    "the parameter '…' of the endpoint has no ",
    "the endpoint names two databases, in its path and with db=",
    "the endpoint's … and its option name two files: leave one out",
    "the URL names several hosts",
    "a unix:// endpoint needs an absolute path",
    "the database '…' in the endpoint is not a number",
    "libpq cannot parse the endpoint; write postgresql://",
    "several hosts need --rdzv-conf sentinel=<name> or cluster=true",
    "the URL has a user name: remove it",
    "is --rdzv-endpoint a region or URL that this host reaches?",
    "no region is set: use --rdzv-endpoint=us-east-1 or",
    "…; set $AWS_PROFILE or profile=..., or give this host a role",
    "; `aws configure list-profiles` lists the profiles",
    # What is not installed.
    "needs the package '…', which cannot be imported (…). Install it with: pip install",
    "the package 'nvidia-ml-py' cannot be imported (…). Install it with: pip install 'rdzv-plugins",
    "unknown backend '…'; …",
    # What a server lacks.
    "does not answer as DynamoDB does (…); is it another server's port?",
    "the table '…' has another schema (…): it needs",
    "there is no table '…': create it with",
    "raise the table's capacity",
    "holds items of at most 400 KB, keys included (…)",
    "requires TLS; write https:// in front of the endpoint, or tls=true",
    "requires an encrypted connection (…); set tls=true and ca_file",
    "speaks no TLS (…); leave out tls=true",
    "refused the token (…, perhaps a proxy's answer); set one in",
    "refused a value (…); its txn_max_req_len is below the default",
    "has authentication disabled (…); leave out the user",
    "refuses a client certificate with a common name while authentication is on; set cert_file to",
    "has no v3 gateway: it is older than 3.4, or runs with --enable-grpc-gateway=false",
    "option 'bucket': '…' has more than letters, digits, '_' and '-'",
    "are set together: leave all but one out",
    "has a bucket '…' that does not republish, so nobody would be woken; run",
    "refused a value: its max_payload is below … bytes",
    "has no bucket '…'; create it, with",
    "offers no JetStream to this user (…); enable it for",
    "requires TLS; write tls:// in front of the endpoint, or tls=true",
    "speaks no TLS; give the server a certificate, or write nats://",
    "option 'owner': '…' is neither auto, none nor <apiVersion>/<kind>/<name>/<uid>",
    "the Kubernetes API takes no user: leave it out, and set a token",
    "several of token, token_file and password are set: leave all but one out",
    "with an endpoint, context and kubeconfig have no effect: leave them out",
    "the endpoint has a user: leave it out, and set a token",
    "there is no endpoint, no service account of a pod, and no kubeconfig (…)",
    "the kubeconfig cannot be used (…)",
    "the kubeconfig verifies no certificate: give it a certificate authority",
    "the kubeconfig has a tls-server-name, which this backend cannot check",
    "has no namespace '…'; kubectl create namespace …, or set namespace=",
    "is deleting the namespace '…' (…); set another with namespace=",
    "option 'labels': '…' is not <name>=<value>+<name>=<value>",
    "refused a value (…); its etcd takes less",
    "gave no answer within … s (…); is its etcd running, and every",
    "requires TLS; write https:// in front of the endpoint",
    "has no connection left for this node (…); raise its maxclients",
    "has no such database (…); name one in the endpoint",
    "lacks resources (…); its log says more",
    "is behind a pooler that keeps no connection for a client (…; of PgBouncer: pool_mode=",
    "a node holds two, and at times two more for the history: raise max_connections",
    "has no table …; set create_table=true, or run: …",
    "has a table … with another schema (…); name another table",
    "AWS's configuration is not valid: …; correct it",
    "none of … writers at once wrote an object",
    "'…' was removed and created again and again",
    "is too old: it does not know a request of …; upgrade it",
    "the key '…' does not hold a state of torch's handler (…); delete it, or use another",
    # The c10d store, for who writes a program on it.
    "multi_set got … keys but … values",
    "'…' holds a value: it cannot be a queue too",
    "queue is empty: '…'",
    # `rdzv serve`, and whoever starts a local server in tests.
    "rdzv serve starts valkey or redis, and with -e HOST,HOST,HOST this host's member of a",
    "… takes neither -i nor -c",
    "cannot make password_file '…': …",
    " is not installed",
    "unknown server '…'; there are: …",
    "the endpoint must name the bucket, as in …",
    "the endpoint must name a bucket and no more, as in …",
    "has no such bucket (…); create it, or name another",
    "the url '…' must begin with http:// or https:// and name a host",
    "the options or the credentials in the environment are not valid: …",
    "does not speak TLS (…); write http:// in the url, or name the port for TLS",
    "knows no conditional writes (…); take another store",
    "Take a version of the store, or of the gateway before it, that knows conditional writes",
    "cannot be asked in a process that was forked from one that has asked a bucket, for",
    "port … of … is taken (…)",
    "the host '…' is not known here (…)",
    "'…' is not this host: give an address or a name of this one",
    "'…' is … on this host, where no other host reaches it: give the address by",
    "a … that other hosts reach needs a password",
    "$… names '…', which is no program",
    # The server's or the agents' own log follows.
    "… nodes did not come to train together; the agents' log:\n…",
    "… was not ready within … s:\n…",
    "… has ended:\n…",
)

# Parts of texts that nobody is shown alone: they stand in the brackets or in front of another line,
# or are caught, or show a fault in a program that calls this package.
IS_PART_OF_ANOTHER = (
    "…; or grant access, in zkCli.sh: …",
    "another member is there; …",
    "this member is connected",
    "… of … members answer",
    "it reads nothing",
    "no member has this index",
    "the connection was closed",
    "a message of … bytes",
    "somebody in between has changed a message",
    "'…' is there (version …)",
    "it is another program",
    "there is no route to it",
    "the host has no address",
    "no answer in time",
    "timed out",
    "nobody listens there",
    "the connection ended after … bytes",
    "the member ended the watch",
    "the store is away",
    # "is sealed with a secret, and none is set here: ..." follows.
    "the run …",
    "the list of excluded hosts …",
    "it logged this client in, and answered no query",
    "it gave this client's server to another one",
    "closed",
    "memory",
    "… at '…': …",
    "run '…': …",
    "a node's record is unreadable: …",
    "a beat every … s, a lease of … s - at `$.lease`",
    "the name or number of no host - at `$.addr`",
    "no address:port - at `$.master`",
    "it has … bytes, more than …",
    "a control character - at `$.…`",
    "what stands in the store is the id of no node",
    "what stands in the store is no address:port",
    "a queue is unreadable: …",
    "more than … bytes",
    "incomplete, or more than one",
    "this handler of run '…' was shut down",
    "the round is over: no node will write '…'",
    "_set_if and add are scripts",
    "option 'checks': …",
)

# Expressions without a text of their own: a server's or a library's words, or an error made before.
COMPUTED = (
    "error",
    "str(error)",
    "f'{failed}: {error}'",
    "f'{self._client.name}: {finding.line}'",
    "text",
    "said",
    "number",
    "status",
    "answer.status",
    "self.away[1]",
    "self.reason",
    "self.where",
    "'; '.join(map(_said, failures))",
    "pgconn.error_message.decode('utf-8', 'replace')",
    "str(self.connection.last_error or '')",
)

WHAT_TO_DO = """{place} has an error or warning that docs/troubleshooting.md does not know:

    {text}

Quote it there: as a heading in code (### `...`), or as a list item that begins with code, with "…"
for what differs from run to run. If it says itself what failed and what to do, add a part of it to
EXPLAINS_ITSELF in tests/unit/test_troubleshooting.py instead.
"""


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_printed(line: str) -> None:
    assert any(line in text for text in strings_of_product())


def test_each_text_of_the_product_is_on_the_page_or_explains_itself() -> None:
    known = (*LINES, *EXPLAINS_ITSELF)
    unknown = [
        WHAT_TO_DO.format(place=place, text=text)
        for text, place in of_product().texts.items()
        if not any(part in text for part in known) and text not in IS_PART_OF_ANOTHER
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("part", EXPLAINS_ITSELF)
def test_what_explains_itself_is_said_and_not_on_the_page(part: str) -> None:
    texts = [text for text in of_product().texts if part in text]
    assert texts
    assert not [text for text in texts if any(line in text for line in LINES)]


@pytest.mark.parametrize("text", IS_PART_OF_ANOTHER)
def test_what_is_a_part_is_said(text: str) -> None:
    assert text in of_product().texts


def test_no_text_is_computed_unseen() -> None:
    computed = of_product().computed
    new = {it: place for it, place in computed.items() if it not in COMPUTED}
    assert not new, f"write the text as a string, or say in COMPUTED where it is made: {new}"
    assert not {*COMPUTED} - {*computed}


def test_there_is_something_to_compare() -> None:
    assert len(LINES) > 40
    assert len(of_product().texts) > 150


class TestCollector:
    """What counts as told: an error raised by whatever way, a warning, a part of either."""

    @pytest.mark.parametrize(
        "code",
        [
            "raise ValueError(f'it fails ({error})')",
            "raise ValueError(f'it fails ({error})') from error",
            "return RendezvousStateError(f'it fails ({error})')",
            "raise kind(f'it fails ({error})')",
            "raise OSError('it fails (%s)' % error) if False else ValueError('it fails (%s)')",
            "log.warning('it fails (%s)', error)",
            "self._log.error(f'it fails ({error})')",
            "log.error(\"run '%s': %s\", run, f'it fails ({error})')",
            "log.exception('it fails (%s)')",
            "return Problem(f'it fails ({error})', retryable=True)",
            "yield Tell('lost', f'it fails ({error})')",
            "def remarks(view):\n    text = f'it fails ({error})'\n    yield 'lost', key, text",
            "_PROBLEMS = {'pattern': Problem('it fails ({said})', retryable=True)}",
            "raise ValueError(_text(1))\ndef _text(it):\n    return f'it fails ({it})'",
        ],
    )
    def test_it_finds(self, code: str) -> None:
        assert "it fails (…)" in collected(code).texts

    @pytest.mark.parametrize(
        "code",
        [
            "log.info('it goes on')",
            "yield Tell('round', 'it goes on')",
            "def remarks(view):\n    yield 'closed', key, 'it goes on'",
            "raise typer.Exit(1)",
            "text = 'it goes on'",
        ],
    )
    def test_it_leaves_out(self, code: str) -> None:
        assert collected(code) == Said()

    def test_it_tells_what_it_cannot_read(self) -> None:
        assert "words()" in collected("raise ValueError(words())").computed
        text_elsewhere = "def a():\n    text = 'x y'\ndef b(text):\n    raise ValueError(text)"
        assert collected(text_elsewhere).computed == {"text": "a.py:4"}


def collected(code: str) -> Said:
    lines = code if code.startswith(("def", "_", "raise ValueError(_")) else f"def it():\n {code}"
    return of_code(lines, "a.py")
