"""Thirty kinds of secret, each in five quotings: no word of one is left."""

from __future__ import annotations

import random
import string

import pytest

from fsdp_doctor.bundle.redaction import Redactor

_LETTERS = string.ascii_letters + string.digits
_LOWER = string.ascii_lowercase + string.digits
_HEX = "0123456789abcdef"
_RANDOM = random.Random(30)


def _random(length: int, letters: str = _LETTERS) -> str:
    # Ends in a digit and a letter: a secret of one sort of character alone would be another claim.
    return "".join(_RANDOM.choice(letters) for _ in range(length - 2)) + "7e"


# Those that have a form. No prefix stands whole here, so that nothing takes this file for one that holds secrets.
_BY_FORM = {
    "Hugging Face": "h" + "f_" + _random(34),
    "GitHub": "gh" + "p_" + _random(36),
    "GitHub, fine-grained": "github" + "_pat_" + _random(60),
    "GitLab": "gl" + "pat-" + _random(20),
    "OpenAI": "s" + "k-proj-" + _random(40),
    "Anthropic": "s" + "k-ant-api03-" + _random(40),
    "AWS key id": "AK" + "IA" + _random(14, string.ascii_uppercase).upper(),
    "Google": "AI" + "za" + _random(35),
    "Slack": "xo" + "xb-" + _random(12, string.digits) + "-" + _random(24),
    "npm": "np" + "m_" + _random(36),
    "PyPI": "py" + "pi-" + _random(60),
    "Weights & Biases": "wan" + "db_v1_" + _random(40),
    "NVIDIA": "nv" + "api-" + _random(60),
    "Databricks": "da" + "pi" + _random(32, _HEX),
    "Vault": "hv" + "s." + _random(24),
    "Docker": "dck" + "r_pat_" + _random(27),
    "Stripe": "s" + "k_live_" + _random(24),
    "Azure": _random(3) + "8Q~" + _random(34),
    "Alibaba": "LT" + "AI" + _random(20),
    "Terraform": _random(14) + ".atlas" + "v1." + _random(64),
}
_QUOTED_FORMS = ("the key {} was refused", 'KEY="{}"', "key='{}'", '{{"value": "{}"}}', r"{{\"value\": \"{}\"}}")
# Those that only their name shows: a quoted one may have blanks.
_BY_NAME = ("PASSWORD", "api_key", "client-secret", "AWS_SECRET_ACCESS_KEY", "hub_token", "passphrase", "WANDB_API_KEY")
_QUOTED_NAMES = ('{}="{}"', "{}='{}'", '"{}": "{}"', r"\"{}\": \"{}\"", '--{} "{}"')
# Those that only the command or the line before shows.
_BY_COMMAND = {
    "docker login": "docker login -u joan -p {} ghcr.io",
    "podman login": "podman login --password {} quay.io",
    "wandb asks": "wandb: Paste an API key from your profile and hit enter:\nwandb: {}",
    "after a login": "$ wandb login\n{}\nwandb: Appending key for api.wandb.ai",
}
_QUOTED_ARGUMENTS = ("{}", '"{}"', "'{}'", " {}", '"{}" ')


def _texts_by_kind() -> dict[str, tuple[str, list[str]]]:
    """Maps each kind to a secret and the texts that have it."""
    texts = {kind: (secret, [quoted.format(secret) for quoted in _QUOTED_FORMS]) for kind, secret in _BY_FORM.items()}
    for name in _BY_NAME:
        secret = " ".join(_random(5, _LOWER) for _ in range(3))
        texts[name] = secret, [quoted.format(name, secret) for quoted in _QUOTED_NAMES]
    for kind, command in _BY_COMMAND.items():
        secret = _random(40, _HEX)
        texts[kind] = secret, [command.format(quoted.format(secret)) for quoted in _QUOTED_ARGUMENTS]
    return texts


_TEXTS = _texts_by_kind()


def test_there_are_thirty_kinds_in_five_quotings_each() -> None:
    assert len(_TEXTS) >= 30
    assert {len(texts) for _, texts in _TEXTS.values()} == {5}


@pytest.mark.parametrize("kind", _TEXTS)
def test_no_word_of_a_secret_is_left_whatever_quotes_it(kind: str) -> None:
    secret, texts = _TEXTS[kind]
    cleaned = [Redactor().clean(text) for text in texts]
    assert [text for text in cleaned if any(word in text for word in secret.split())] == []


@pytest.mark.parametrize(
    "text",
    ["LITELLM_KEY={}", "x-service-key: {}", "DB_PASS: {}", "export FOO={}", "at = '{}'", r"{{\"at\": \"{}\"}}"],
)
def test_a_random_assigned_value_is_replaced_whatever_its_variable_is_called(text: str) -> None:
    secret = _random(32)
    assert secret not in Redactor().clean(text.format(secret))


def test_a_secret_whose_quote_is_never_closed_is_replaced() -> None:
    assert "hunter2xx" not in Redactor().clean('password="hunter2xx and no more')


def test_an_organisation_is_replaced_wherever_it_stands() -> None:
    redactor = Redactor()
    texts = [
        "wandb: Currently logged in as: florimel (snailworks). Use `wandb login --relogin`",
        "WANDB_ENTITY=snailworks python train.py",
        "/mnt/snailworks/ckpt/step_5 and https://github.com/SnailWorks/train",
    ]
    for text in texts:
        redactor.learn(text)
    assert [text for text in texts if "snailworks" in redactor.clean(text).lower()] == []


def test_a_bucket_is_replaced_in_a_path_too() -> None:
    redactor = Redactor()
    redactor.learn("saving to s3://snailworks-ckpts/run")
    assert redactor.clean("/mnt/snailworks-ckpts/run") == "/mnt/BUCKET_1/run"


@pytest.mark.parametrize(
    "text",
    [
        "$ git log\ncommit 7f1546e8a9b0c1d2e3f405162738495a6b7c8d9e\nAuthor: somebody",
        "logged in\nHEAD 7f1546e8a9b0c1d2e3f405162738495a6b7c8d9e",
        "docker login succeeded -- port 5000",
        "architecture='Qwen2MoeForSequenceClassification', run=20260101T120005Z, key layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_hash_of_a_commit_is_no_key(text: str) -> None:
    assert Redactor().clean(text) == text
