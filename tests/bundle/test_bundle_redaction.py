"""Nothing private leaves in a bundle, and what only looks private stays readable."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from support import reports

from fsdp_doctor import repro
from fsdp_doctor.bundle import Bundle, gather, make_bundle
from fsdp_doctor.bundle.redaction import IS_PLACEHOLDER, PLACEHOLDER, Redactor
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import read_report_dict
from fsdp_doctor.report.layout import summarize

# By what it is: a line as a log has it, and the part of it that must not leave. No prefix of a token stands whole here,
# so that nothing takes this file for one that holds secrets.
PLANTED: dict[str, tuple[str, str]] = {
    "random text": ("value = 'tYq8dLk2mVx0Qw9sZr4PbN7c'", "tYq8dLk2mVx0Qw9sZr4PbN7c"),
    "Hugging Face": ("loading with h" + "f_AbCdEfGhIjKlMnOpQrStUvWxYz012345 set", "AbCdEfGhIjKlMnOpQrStUvWxYz012345"),
    "Hugging Face, small letters": ("h" + "f_abcdefghijklmnopqrstuvwxyzabcdefgh", "abcdefghijklmnopqrstuvwxyz"),
    "GitHub": ("remote: gh" + "p_abcdefghijklmnopqrstuvwxyz0123456789", "abcdefghijklmnopqrstuvwxyz0123456789"),
    "GitHub, fine-grained": ("github" + "_pat_11ABCDE0Y0abcdefghijkl_mnopq", "11ABCDE0Y0abcdefghijkl"),
    "GitLab": ("glp" + "at-xYz123_abcDEF456ghi7", "xYz123_abcDEF456ghi7"),
    "OpenAI": ("judge uses s" + "k-proj-abc123DEF456ghi789jkl0", "abc123DEF456ghi789jkl0"),
    "Anthropic": ("s" + "k-ant-api03-Qwertyuiop12345", "Qwertyuiop12345"),
    "AWS key id": ("AK" + "IAIOSFODNN7SAMPLEX", "IOSFODNN7SAMPLEX"),
    "AWS secret": ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYSAMPLEKEY", "wJalrXUtnFEMI"),
    "Google": ("AI" + "zaSyA1234567890abcdefghijklmnopqrstuv", "SyA1234567890abcdefghijklmnopqrstuv"),
    "Slack token": ("xo" + "xb-123456789012-abcdefABCDEF", "123456789012-abcdefABCDEF"),
    "Slack webhook": ("POST https://hooks.slack.com/services/T00AB/B00CD/XyZ123abc", "T00AB/B00CD/XyZ123abc"),
    "Discord webhook": ("https://discord.com/api/webhooks/99887766/aBcD-eF_gH", "99887766/aBcD-eF_gH"),
    "npm": ("np" + "m_abcdefghijklmnopqrstuvwxyz0123456789", "abcdefghijklmnopqrstuvwxyz0123456789"),
    "PyPI": ("py" + "pi-AgEIcHlwaS5vcmcCJDU3ZTk4YWItMjM0NQACKlsz", "AgEIcHlwaS5vcmcCJDU3"),
    "JWT": ("ey" + "JhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN", "eyJzdWIiOiIxMjM0In0"),
    "bearer": ("Authorization: Bearer 0123456789abcdef.zzz", "0123456789abcdef.zzz"),
    "basic": ("authorization: Basic cXdlcnR5OjEyMzQ1Ng==", "cXdlcnR5OjEyMzQ1Ng"),
    "wandb key in the environment": (
        "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "0123456789abcdef0123456789abcdef01234567",
    ),
    "wandb login": ("$ wandb login 76543210fedcba9876543210fedcba9876543210", "76543210fedcba98"),
    "JSON": ('{"neptune_api_token": "q9w8e7r6t5"}', "q9w8e7r6t5"),
    "JSON in JSON": (r'"{\"password\": \"hunter2xx\"}"', "hunter2xx"),
    "YAML": ("mlflow_tracking_password: corr3ct-horse", "corr3ct-horse"),
    "flag": ("train.py --comet-api-key 12345abcde --lr 1e-5", "12345abcde"),
    "token flag": ("huggingface-cli login --token tok3nvalue99", "tok3nvalue99"),
    "Python": ("login(token='abcd1234efgh5678ijkl')", "abcd1234efgh5678ijkl"),
    "credentials in a URL": ("git clone https://deploy:s3cr3tpw@github.com/a/b.git", "s3cr3tpw"),
    "signed URL": ("GET https://x.amazonaws.com/k?X-Amz-Signature=deadbeef99&a=1", "deadbeef99"),
    "Azure": ("DefaultEndpointsProtocol=https;AccountKey=Zm9vYmFyYmF6MTIz==;", "Zm9vYmFyYmF6MTIz"),
    "curl": ("curl -s -u joan:passw9rd https://github.com", "passw9rd"),
    "netrc": ("machine api.wandb.ai login user password 5cc5cc5cc5cc", "5cc5cc5cc5cc"),
    "docker": ('"auth": "am9hbjpwYXNzd29yZA=="', "am9hbjpwYXNzd29yZA"),
    "private key": (
        "-----BEGIN OPENSSH PRIVATE" + " KEY-----\nb3BlbnNzaC1rZXktdjEAAAA\n-----END OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1rZXktdjEAAAA",
    ),
    "private key, cut off": (
        "[rank0]: MIIEpAIBAAKCAQEA7bq2J3xYz8Kq1Lm4Nn5Oo6Pp7Qq8Rr9Ss0Tt1Uu2Vv3Ww4Xx",
        "MIIEpAIBAAKCAQEA7bq2J3xYz8Kq1Lm4Nn5Oo6Pp7Qq8",
    ),
    "public key": ("ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7 rosalind@thinkpad-9", "AAAAB3NzaC1yc2EAAAADAQAB"),
    "its owner": ("keys of rosalind were used", "rosalind"),
    "cookie": ("Set-Cookie: session=abcdef; Path=/", "session=abcdef"),
    "e-mail": ("mail dave.smith+gpu@uni-nowhere.de about it", "dave.smith+gpu@uni-nowhere.de"),
    "bucket": ("saving to s3://nowhere-secret-models/step_10", "nowhere-secret-models"),
    "private IPv4": ("connect to 10.3.9.90:29500 failed", "10.3.9.90"),
    "IPv4 in a sentence": ("peer 192.168.1.17 went away", "192.168.1.17"),
    "public IPv4": ("from 34.201.55.9", "34.201.55.9"),
    "IPv6": ("[c10d] listening on 2001:db8:85a3::8a2e:370:7334", "2001:db8:85a3::8a2e:370:7334"),
    "link-local IPv6": ("bound to fe80::1ff:fe23:4567:890a%eth0", "fe80::1ff:fe23:4567:890a"),
    "MAC": ("link/ether 02:42:ac:11:00:02 brd", "02:42:ac:11:00:02"),
    "GPU": ("CUDA_VISIBLE_DEVICES=GPU-5d5ba0d6-1c2b-3d4e-5f60-718293a4b5c6", "5d5ba0d6-1c2b"),
    "host in a sentence": ("step 3 on host dgx-h100-04 has ended", "dgx-h100-04"),
    "host of NCCL": ("dgx-node-3:1234:1299 [0] NCCL INFO Bootstrap", "dgx-node-3"),
    "host of c10d": ("The client socket has failed to connect to [gpubox7]:29500 (errno: 110)", "gpubox7"),
    "host of torchrun": ("  host      : trainer-17.cluster.nowhere", "trainer-17"),
    "host of Slurm": ("srun: error: hpc-n0042: task 3: Exited with exit code 1", "hpc-n0042"),
    "nodes of Slurm": ("SLURM_JOB_NODELIST=frontier[00001-00004]", "frontier[00001"),
    "master address": ("export MASTER_ADDR=superpod", "superpod"),
    "domain name": ("could not resolve login.hpc.nowhere.edu", "login.hpc.nowhere.edu"),
    "internal URL": ("GET http://registry.nowhere.internal/v2/", "registry.nowhere.internal"),
    "home directory": ('  File "/home/ermintrude/project/train.py", line 3, in f', "/home/ermintrude"),
    "its user elsewhere": ("the run ermintrude_sft_3 has ended", "ermintrude"),
    "home on a Mac": ("/Users/florence/Code/x.py", "florence"),
    "home on Windows": (r"C:\Users\Zebedee\x.py", "Zebedee"),
    "home on a cluster": ("/mnt/nfs/home/brian/ckpt/step_5", "brian"),
    "prompt": ("dougal@nowherebox:~/work$ torchrun train.py", "dougal"),
    "user at a host": ("started by zebulon@gpu07 at noon", "zebulon"),
    "host of a user": ("started by zebulon@gpu07 at noon", "gpu07"),
    "owner of a job": ("JobId=77 UserId=florimel(1001) GroupId=lab", "florimel"),
    "Atlassian": ("auth with AT" + "ATT3xFfGF0abcdefghijklmnopqrst", "xFfGF0abcdefghijklmnopqrst"),
    "Bitbucket": ("app password AT" + "BBabcdefghijklmnopqrstuvwx", "BBabcdefghijklmnopqrstuvwx"),
    "Groq": ("gs" + "k_abcdefghijklmnopqrstuvwxyz0123456789", "k_abcdefghijklmnopqrstuvwxyz"),
    "Replicate": ("r" + "8_abcdefghijklmnopqrstuvwxyz0123456789", "8_abcdefghijklmnopqrstuvwxyz"),
    "NVIDIA": ("nv" + "api-abcdefghijklmnopqrstu0123", "api-abcdefghijklmnopqrstu0123"),
    "wandb, new form": ("wan" + "db_v1_abcdefghijklmnopqrstuvwx", "_v1_abcdefghijklmnopqrstuvwx"),
    "LangSmith": ("ls" + "v2_pt_abcdefghijklmnopqrstuvwx", "v2_pt_abcdefghijklmnopqrstuvwx"),
    "Google OAuth": ("ya" + "29.a0AfH6SMBabcdef1234567890", "29.a0AfH6SMBabcdef1234567890"),
    "Google client": ("GOC" + "SPX-abcdefghijklmnopqrstuvwx", "SPX-abcdefghijklmnopqrstuvwx"),
    "Google service account": ('"private_key_id": "a1b2c3d4e5f6a7b8c9d0"', "a1b2c3d4e5f6a7b8c9d0"),
    "Azure client": ("AZURE_CLIENT_SECRET=q8Q~zzzzzzzzzz", "q8Q~zzzzzzzzzz"),
    "Azure SAS": ("https://a.blob.core.windows.net/c/b?sv=2022&sig=qwe%2Frty%3D&se=1", "qwe%2Frty%3D"),
    "DigitalOcean": ("do" + "p_v1_" + "0a1b2c3d" * 8, "0a1b2c3d" * 8),
    "Databricks": ("da" + "pi0123456789abcdef0123456789abcdef", "pi0123456789abcdef0123456789abcdef"),
    "Vault": ("hv" + "s.CAESIabcdefghijklmnopqrst", "CAESIabcdefghijklmnopqrst"),
    "Tailscale": ("ts" + "key-auth-abcdefCNTRL-abcdef123", "key-auth-abcdefCNTRL"),
    "Telegram": ("12345678" + ":AAabcdefghijklmnopqrstuvwxyz0123456", "AAabcdefghijklmnopqrstuvwxyz0123456"),
    "Notion": ("nt" + "n_12345678901abcdefghijklmnopqrstuvw", "n_12345678901abcdefghijklmnopqrstuvw"),
    "Linear": ("li" + "n_api_abcdefghijklmnopqrstuvwxyz0123", "n_api_abcdefghijklmnopqrstuvwxyz0123"),
    "Teams webhook": ("https://x.webhook.office.com/webhookb2/ab12@cd34/In/ef", "ab12@cd34"),
    "Feishu webhook": ("https://open.feishu.cn/open-apis/bot/v2/hook/7a7b-8c8d", "7a7b-8c8d"),
    "Docker": ("dck" + "r_pat_abcdefghijklmnop1234", "_pat_abcdefghijklmnop1234"),
    "Stripe": ("s" + "k_live_abcdefghijklmnop1234", "abcdefghijklmnop1234"),
    "Shopify": ("shp" + "at_0123456789abcdef0123456789abcdef", "at_0123456789abcdef0123456789abcdef"),
    "SendGrid": ("S" + "G.abcdefghijklmnopqrst.abcdefghijklmnopqrst", "G.abcdefghijklmnopqrst"),
    "Grafana": ("gl" + "sa_abcdefghijklmnopqrstuvwxyz0123456", "sa_abcdefghijklmnopqrstuvwxyz0123456"),
    "1Password": ("op" + "s_eyJzaWduSW5BZGRyZXNzIjoibXkuMXBhc3N3b3JkLmNvbSJ9AAAA", "s_eyJzaWduSW5BZGRyZXNz"),
    "Alibaba": ("LT" + "AI5tAbCdEfGhIjKlMnOpQr", "AI5tAbCdEfGhIjKlMnOpQr"),
    "Azure AD": ("abc8" + "Q~" + "aB3" * 11, "aB3" * 11),
    "Artifactory": ("artifactory uses AK" + "Cp" + "8aB3" * 17, "8aB3" * 17),
    "Pulumi": ("pu" + "l-" + "0a1b2c3d" * 5, "0a1b2c3d" * 5),
    "a job's token": ("CI_JOB_TOKEN=64_qazwsxedc", "64_qazwsxedc"),
    "database": ("postgresql+psycopg2://train:pgp4ssw0rd@10.3.9.90:5432/runs", "pgp4ssw0rd"),
    "broker without a user": ("redis://:r3d1spass@cache-7:6379/0", "r3d1spass"),
    "kaggle.json": (
        '{"username":"florimel","key":"0f1e2d3c4b5a69788796a5b4c3d2e1f0"}',
        "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    ),
    "proxy": ("https_proxy=http://florimel:pr0xyp4ss@proxy-3.nowhere.net:3128", "pr0xyp4ss"),
    "sshpass": ("sshpass -p fr0bnicate ssh gpu07", "fr0bnicate"),
    "bucket in a URL": ("https://s3.us-east-1.amazonaws.com/nowhere-more-models/k", "nowhere-more-models"),
    "role": ("arn:aws:iam::210987654321:role/Train", "210987654321"),
    "registry": ("210987654321.dkr.ecr.us-east-1.amazonaws.com/train:latest", "210987654321"),
    "MAC with dots": ("arp 00d4.2a4b.5c6d", "00d4.2a4b.5c6d"),
    "IPv4 of a variable": ("KUBERNETES_SERVICE_HOST=10.96.0.1", "10.96.0.1"),
    "IPv4 of Ray": ("(WorkerDict pid=1234, ip=172.19.3.4) it began", "172.19.3.4"),
    "UUID of a GPU": ("'uuid': '1d5ba0d6-1c2b-3d4e-5f60-718293a4b5c6'", "1d5ba0d6-1c2b-3d4e-5f60-718293a4b5c6"),
    "serial number": ("    Serial Number                         : 1320220012345", "1320220012345"),
    "Windows share": (r"\\filer\zebedee\models\x", r"filer\zebedee"),
    "home in WSL": ("/mnt/c/Users/zebedee.w/x.py", "zebedee.w"),
    "home in a URL": ("file:///home/ermintrude/x.py", "ermintrude"),
    "account of Slurm": ("SLURM_JOB_ACCOUNT=proj_snail", "proj_snail"),
    "wandb account": ("wandb: Currently logged in as: mcHenry (magic). Use", "mcHenry"),
    "wandb run": ("https://wandb.ai/magicteam/llm/runs/ab12", "magicteam"),
}

# As they stand in logs and reports of ours, and nobody's secret.
READABLE = r"""torch 2.13.0.1, torch==2.13.0.1, version 2.13.0.1, (2.13.0.1), 2.13.0.1
nvidia-cublas-cu12==12.8.4.1  nvidia-curand-cu12 10.3.9.90  nvidia_curand_cu12-10.3.9.90-py3-none-any.whl
NCCL version 2.27.3.1+cuda12.9, cuDNN 9.10.2.21, driver 570.86.10
torch.Size([2, 3, 4096]) vs (1024, 2048), shape [151936, 896]
fsdp2/policy/staged/state_dict fsdp1-orig/param+optimizer/unstaged/uneven/full_state_dict
  File "/opt/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 2256, in state_dict
  File "torch/distributed/fsdp/_fully_shard/_fsdp_param.py", line 1, in reset_sharded_param
commit 7f1546e8a9b0c1d2e3f405162738495a6b7c8d9e, git bisect 9f5110d
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
layers.0.self_attn.q_proj.weight, model.embed_tokens.weight, optimizer.state.exp_avg
pad_token_id: 151643, eos_token=<|im_end|>, max_tokens=4096, valid_tokens: 41234567, num_input_tokens_seen=12
RuntimeError: Error(s) in loading state_dict for Qwen3ForCausalLM: Missing key(s) in state_dict: "lm_head.weight".
2026-01-01 12:34:56.789 c10::cuda::ExchangeDevice at::_ops::add::call 0x7f3a2b1c0d0e 0000:3b:00.0
https://github.com/pytorch/pytorch/issues/149762 https://docs.pytorch.org/docs/stable/fsdp.html
threading.local google.protobuf.internal model.module.net torch.distributed.fsdp rank0 [rank1]: cuda:0
tcp://127.0.0.1:29500 localhost:29500 0.0.0.0 ::1 [default0]: AllGather 126
use_auth_token=None token=token secrets.py self.password = password
/usr/lib/x86_64-linux-gnu/libc.so.6 /workspace/train.py /tmp/torchelastic_ab12/attempt_0/0/error.json
hf_transfer hf_checkpoint_weights_iterator sk-learn git@github.com:pytorch/pytorch.git verl@main actions/checkout@v4.2.2
PWD=/workspace/run PAD_TOKEN=<pad_1> EOS_TOKEN: 151643 BOS_TOKEN="<|begin_1|>" tokenizer.pad_token = tokenizer.eos_token
\\n\\nTraceback \\textbf{a} C:\Python311\Lib\site-packages\torch\_tensor.py
torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl 2024.0101.1234
key-value secret_sharing_of_weights re_entrant_checkpoint fw_grad_hook_12 xai-explain serial=True gsk_kernel
rank 1: exit code -6, SIGABRT, pid 12345; ProcessGroupNCCL.cpp:2068 [PG ID 0 PG GUID 0(default_pg) Rank 1]
cache_position past_key_values key_states query_key_value api_key=None password=None "token": null key: value
device_mesh=DeviceMesh('cuda', [0, 1], mesh_dim_names=('fsdp',)) placements=(Shard(dim=0),)
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Makes a log, a report and an environment, each with all that is planted."""
    lines = "\n".join(line for line, _ in PLANTED.values())
    log = tmp_path_factory.mktemp("planted") / "log.txt"
    log.write_text(f"Traceback (most recent call last):\n{lines}\nRuntimeError: {lines}\n")
    report = reports.report(reports.result(reason=lines, traceback=lines), notes=(lines,), ended=lines)
    facts = {"python": "3.12.1", "variables": {"NCCL_DEBUG": lines}, "packages": {"torch": "2.13.0"}}
    return make_bundle(gather(facts, logs=[log], report=report), Redactor())


def test_forty_kinds_and_more_are_planted_and_told_apart(planted: Bundle) -> None:
    assert len(PLANTED) >= 100
    assert len(planted.replaced) >= 40
    assert len(set(PLACEHOLDER.values())) == len(PLACEHOLDER)


@pytest.mark.parametrize("name", PLANTED)
def test_no_file_of_a_bundle_has_what_is_private(planted: Bundle, name: str) -> None:
    _, secret = PLANTED[name]
    assert [file for file, text in planted.files.items() if secret in text or secret in json.dumps(text)] == []


def test_the_bundle_lists_each_kind_that_was_replaced_and_how_often(planted: Bundle) -> None:
    assert set(planted.replaced) == set(PLACEHOLDER)
    for kind, count in planted.replaced.items():
        assert f"{count:6}  {kind} (" in planted.files["replaced.txt"]
        assert f"{kind} ({count})" in planted.files["issue.md"]


@pytest.mark.parametrize("around", [r"loading with (\w+) set", r"peer (\w+) went away", r"UserId=(\w+)\("])
def test_what_is_replaced_has_the_same_placeholder_in_each_file(planted: Bundle, around: str) -> None:
    shown = {name: set(re.findall(around, " ".join(text.split()))) for name, text in planted.files.items()}
    (placeholder,) = set().union(*shown.values())
    assert IS_PLACEHOLDER.fullmatch(placeholder)
    assert all(shown[name] for name in ("log.txt", "report.json", "environment.txt"))


def test_the_host_of_a_report_is_not_in_the_bundle() -> None:
    report = reports.report(reports.result(reason="beluga went away"), environment={"host": "beluga.nowhere"})
    files = make_bundle(gather({}, report=report), Redactor()).files
    assert [name for name, text in files.items() if "beluga" in text] == []


def test_a_report_without_what_is_private_is_still_a_report(planted: Bundle) -> None:
    assert summarize(read_report_dict(json.loads(planted.files["report.json"]))).startswith("1 case")


@pytest.mark.parametrize("line", READABLE.splitlines())
def test_what_only_looks_private_stays_as_it_is(line: str) -> None:
    redactor = Redactor()
    redactor.learn(READABLE)
    assert (redactor.clean(line), redactor.counts) == (line, {})


@pytest.mark.parametrize("log", sorted((pathlib.Path(__file__).parents[1] / "corpus" / "logs").glob("py*.log"))[:12])
def test_of_a_public_log_the_messages_stay_as_they_are(log: pathlib.Path) -> None:
    redactor = Redactor()
    text = log.read_text(errors="replace")
    redactor.learn(text)
    raised = [line for line in text.splitlines() if "Error: " in line and "/home/" not in line and ":/" not in line]
    changed = [line for line in raised if redactor.clean(line) != line]
    assert changed == []


def test_a_script_stays_as_it_is() -> None:
    case = select(Selection(case_ids=("fsdp2/policy/staged/state_dict",)))[0]
    text = repro.render_script(case, repro.find_expected(case))
    redactor = Redactor()
    redactor.learn(text)
    assert redactor.clean(text) == text


def test_the_same_text_has_the_same_placeholder_in_every_text() -> None:
    redactor = Redactor(hosts=["gpu-node-3"], users=["ermintrude"], homes=["/data/ermintrude"])
    texts = ["ermintrude@gpu-node-3: /data/ermintrude/x 10.0.0.5", "10.0.0.6 then 10.0.0.5 on gpu-node-3"]
    assert [redactor.clean(text) for text in texts] == [
        "USER_NAME_1@HOST_1: HOME_DIRECTORY_1/x IPV4_ADDRESS_1",
        "IPV4_ADDRESS_2 then IPV4_ADDRESS_1 on HOST_1",
    ]


def test_a_secret_is_replaced_where_nothing_names_it_too() -> None:
    redactor = Redactor()
    redactor.learn("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567")
    assert (
        redactor.clean("the key 0123456789abcdef0123456789abcdef01234567 is wrong")
        == "the key WEIGHTS_BIASES_KEY_1 is wrong"
    )


def test_text_without_end_takes_no_time_that_grows_with_its_square() -> None:
    redactor = Redactor()
    for text in ("a." * 50_000, "/home" * 20_000, "a@" * 50_000, "1." * 50_000, "x_token" * 20_000, ":" * 100_000):
        redactor.learn(text)
        redactor.clean(text)
