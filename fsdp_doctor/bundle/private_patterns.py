"""Patterns of private text: a group ``x`` that is replaced, and patterns that show the names of hosts and users.

A secret is known by its form, which its service publishes, or by the name or command before it, never by being long and
random alone: versions of four parts, shapes, ids of cases, hashes of commits and names of parameters stay readable.
Forms and names are those of gitleaks (config/gitleaks.toml, MIT license) as far as it has the service; lengths are
at least, not exactly, what it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Whole secrets, by kind; each begins where a word does.
SECRET_FORMS: dict[str, str] = {
    "Hugging Face token": r"hf_(?:(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{16,}|[a-z]{28,})|api_org_[A-Za-z0-9]{28,}",
    "GitHub token": r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}",
    "GitLab token": r"gl(?:pat|rt|dt|ptt|cbt|oas|agent|soat)-[\w-]{16,}",
    "Atlassian token": r"ATATT3[\w=-]{20,}|ATBB[A-Za-z0-9]{20,}|ATCTT3[\w=-]{20,}",
    "Anthropic key": r"sk-ant-[\w-]{12,}",
    "OpenAI key": r"sk-(?:(?=[\w-]*\d)[\w-]{16,}|[A-Za-z]{24,})",
    "model provider's key": (
        r"gsk_[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}|(?:xai|pplx|csk|tgp_v1)[-_](?=[\w-]*\d)[A-Za-z0-9_-]{24,}"
        r"|fw_(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}|pcsk_\w{30,}|rpa_[A-Z0-9]{30,}"
    ),
    "NVIDIA key": r"nvapi-[\w-]{20,}",
    "Weights & Biases key": r"wandb_v\d_\w{20,}",
    "LangSmith key": r"lsv2_(?:pt|sk)_\w{20,}",
    "AWS key": r"A(?:KIA|SIA|IDA|ROA|GPA|BIA|CCA)[A-Z0-9]{12,}",
    "Google key": r"AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{20,}|1//0[\w-]{24,}",
    "DigitalOcean token": r"do[oprt]_v1_[0-9a-f]{32,}",
    "Databricks token": r"dapi[0-9a-f]{28,}(?:-\d)?",
    "Vault token": r"hv[sbr]\.[\w-]{20,}",
    "Tailscale key": r"tskey-[a-z]+-[\w-]{12,}",
    "Slack token": r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{16,}",
    "Telegram token": r"\d{8,10}:AA[\w-]{30,}",
    "Notion token": r"ntn_[A-Za-z0-9]{30,}|secret_(?=[A-Za-z]*\d)[A-Za-z0-9]{40,}",
    "Linear key": r"lin_(?:api|oauth)_[A-Za-z0-9]{30,}",
    "npm token": r"npm_[A-Za-z0-9]{30,}",
    "PyPI token": r"pypi-[\w-]{30,}",
    "Docker token": r"dckr_(?:pat|oat)_[\w-]{16,}",
    "payment service's key": r"(?:sk|rk|pk)_(?:live|test)_\w{16,}|whsec_[\w+/=]{24,}|sq0(?:csp|atp|idp)-[\w-]{16,}",
    "Shopify token": r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{28,}",
    "mail or phone service's key": (
        r"SG\.[\w-]{16,}\.[\w-]{16,}|key-[0-9a-f]{32}|xkeysib-[\w-]{30,}|re_[A-Za-z0-9]{8}_\w{20,}|(?:AC|SK)[0-9a-f]{32}"
    ),
    "monitoring token": (
        r"glsa_\w{30,}|glc_[\w+/=]{30,}|NRAK-[A-Z0-9]{20,}|sntry[su]_[\w+/=-]{30,}|dp\.(?:pt|st|ct)\.[\w.-]{30,}"
    ),
    "JSON web token": r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",
    "private key": r"AGE-SECRET-KEY-\w+",
    "1Password key": r"A3-[A-Z0-9]{6}-[A-Z0-9]{5,11}(?:-[A-Z0-9]{5}){3,4}|ops_eyJ[\w+/=-]{40,}",
    "Alibaba key": r"LTAI[A-Za-z0-9]{16,}",
    "Azure client secret": r"[\w~.]{3}\dQ~[\w~.-]{31,34}",
    "artifact registry's token": r"AKCp[A-Za-z0-9]{60,}|cmVmd[A-Za-z0-9]{50,}|rubygems_[0-9a-f]{40,}",
    "infrastructure token": (
        r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{50,}|pul-[0-9a-f]{40}|pnu_[A-Za-z0-9]{36}|HRKU-[\w-]{30,}|fo1_[\w-]{40,}"
        r"|dt0c01\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{60,}|PMAK-[0-9a-f]{24}-[0-9a-f]{30,}|pscale_(?:tkn|oauth|pw)_[\w=.-]{30,}"
    ),
}


@dataclass(frozen=True)
class Rule:
    """Private text of one kind; ``x`` is the group of ``pattern`` that is replaced."""

    kind: str
    pattern: re.Pattern[str]


def _rule(kind: str, pattern: str, flags: int = 0) -> Rule:
    return Rule(kind, re.compile(pattern, flags))


_ANY_CASE = re.IGNORECASE
# Where a word begins, also after a line's end that was written as two characters.
BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
_QUOTE = r"\\{0,2}[\"']?"
_EQUALS = rf"{_QUOTE}\s{{0,3}}(?:=>|[:=])\s{{0,3}}"
_IS = rf"{_EQUALS}{_QUOTE}"
# Up to the quotation mark that closes it, blanks included; without one that does, a word.
_QUOTED = r"(?(q)(?:(?!(?P=q))[^\n]){3,400}(?=(?P=q))|(?!))"
_WORD = r"[^\s'\"\\,;&}\])]{3,}"
_VALUE = rf"(?P<q>\\{{0,2}}[\"'])?(?P<x>{_QUOTED}|{_WORD})"
# Of an option on a command line.
_ARGUMENT = rf"(?P<q>[\"'])?(?P<x>{_QUOTED}|[^\s'\"-][^\s'\"]{{2,}})"
# Ends of names whose value is a secret, whatever stands before them in the name.
_PASSWORD_NAME = r"(?:(?:passw(?:or)?d|passphrase)s?(?:[_-]\w{1,20})?|_pwd)"
_SECRET_NAME = (
    r"(?:(?:secret|credential|(?:api|access|account|private|signing|auth|encryption|license|webhook)[_-]?key)s?"
    r"(?:[_-]\w{1,20})?)"
)
_TOKEN_NAME = (
    r"(?<![A-Za-z0-9])(?:hf|hub|auth|access|api|bearer|session|refresh|id|gh|github|gitlab|wandb|security|personal"
    r"|oauth|registry|npm|slack|jwt|csrf|vault|databricks|neptune|kaggle|sas|user|pypi|docker|aws|job|bot|deploy)"
    r"[_-]?token"
)
_HEX = "[0-9a-f]"

_UUID = rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"

# Of secrets those with a form come first, so that a name before them does not make them something vaguer.
RULES: tuple[Rule, ...] = (
    _rule(
        "private key",
        r"(?P<x>-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:.{0,16000}?-----END [A-Z ]{0,40}-----|[^\n]*(?:\n[^\n]{1,200}){0,80}))",
        re.DOTALL,
    ),
    # Of a key whose beginning was cut off: whole lines of base64.
    _rule(
        "private key",
        r"^[^\S\n]{0,8}(?:\[[^\]\n]{1,40}\]:? ?)?"
        r"(?P<x>(?=\S{0,79}[a-z])(?=\S{0,79}[A-Z])(?=\S{0,79}\d)[A-Za-z0-9+/]{60,80}={0,2})$",
        re.MULTILINE,
    ),
    _rule("public SSH key", r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\w+) (?P<x>AAAA[A-Za-z0-9+/=]{16,})"),
    *(_rule(kind, rf"{BEGIN}(?P<x>{form})") for kind, form in SECRET_FORMS.items()),
    _rule("webhook", r"hooks\.slack\.com/\w+/(?P<x>[\w/]+)"),
    _rule("webhook", r"discord(?:app)?\.com/api/webhooks/(?P<x>[\w/-]+)"),
    _rule("webhook", r"webhook\.office\.com/(?P<x>[^\s'\"]+)"),
    _rule("webhook", r"/(?:bot/v2/hook|robot/send\?access_token=|webhook/send\?key=)/?(?P<x>[\w-]+)"),
    _rule("Azure key", rf"\b(?:AccountKey|SharedAccessKey){_EQUALS}{_VALUE}"),
    _rule(
        "secret in a URL",
        r"(?:[?&]|SharedAccessSignature=)[\w.-]*(?:token|key|secret|sig(?:nature)?|password|credential)[\w-]*=(?P<x>[^\s&#'\"<>]+)",
        _ANY_CASE,
    ),
    _rule(
        "authorization header",
        rf"\b(?:proxy-)?authorization{_IS}(?:(?:bearer|basic|token|digest|negotiate)\s+)?(?P<x>{_WORD})",
        _ANY_CASE,
    ),
    _rule("authorization header", r"\b(?:bearer|basic)\s+(?P<x>(?=[^\s'\"]*\d)[\w.~+/=-]{12,})", _ANY_CASE),
    _rule("cookie", rf"\b(?:set-)?cookie{_IS}(?P<x>[^\n'\"]{{4,}})", _ANY_CASE),
    _rule("credentials in a URL", r"\b[a-z][a-z0-9+.-]{1,20}://(?!git@)(?P<x>[^\s/@'\"<>]{1,400})@", _ANY_CASE),
    _rule("password", r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(?P<x>\S+)"),
    _rule("password", r"\bsshpass\s+-p\s*(?P<x>\S+)"),
    _rule("password", r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)\s+(?P<x>\S+:\S+)"),
    _rule("Docker token", rf"\bauth{_IS}(?P<x>[A-Za-z0-9+/]{{12,}}={{0,2}})(?=[\"'])"),
    _rule(
        "named key or secret", rf"\busername{_IS}[\w.-]{{1,40}}{_QUOTE},\s{{0,3}}{_QUOTE}key{_IS}(?P<x>{_HEX}{{32}})"
    ),
    _rule(
        "password",
        r"\b(?:docker|podman|nerdctl|skopeo|crane|helm|oras)\b[^\n]{0,200}?\blogin\b[^\n]{0,200}?\s(?:-p|--password)[=\s]\s*"
        + _ARGUMENT,
    ),
    # A key that a user was asked for: on the line that asks, or on one of the next two.
    _rule(
        "Weights & Biases key",
        r"(?:\bapi[ _-]?key|\blog(?:ged)?[ -]?in|wandb\.ai/authorize)\b[^\n]{0,200}(?:\n[^\n]{0,200}){0,2}?"
        rf"(?<![A-Za-z0-9])(?<!commit )(?<!commit: )(?<!HEAD )(?<!sha1:)(?P<x>{_HEX}{{40}})(?![A-Za-z0-9])",
        _ANY_CASE,
    ),
    _rule("Weights & Biases key", r"\bwandb\s+login\s+(?:--\S+\s+)*(?P<x>[\w-]{16,})"),
    _rule("Weights & Biases key", rf"\bWANDB_API_KEY{_EQUALS}{_VALUE}"),
    _rule("AWS key", rf"\baws_?(?:secret_?access_?key|session_?token){_EQUALS}{_VALUE}", _ANY_CASE),
    _rule("Azure key", rf"\bAZURE_\w{{0,40}}?(?:KEY|SECRET|TOKEN){_EQUALS}{_VALUE}"),
    _rule("password", rf"{_PASSWORD_NAME}{_EQUALS}{_VALUE}", _ANY_CASE),
    _rule("password", rf"--[\w-]{{0,40}}?{_PASSWORD_NAME}\s+{_ARGUMENT}", _ANY_CASE),
    _rule("named token", rf"(?<![\w.])token{_IS}(?P<x>(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{{16,}})", _ANY_CASE),
    _rule("named token", r"--(?:hf[_-])?token[=\s]\s*['\"]?(?P<x>[^\s'\"-][^\s'\"]{5,})", _ANY_CASE),
    _rule("named token", rf"{_TOKEN_NAME}{_EQUALS}{_VALUE}", _ANY_CASE),
    _rule("named token", rf"--[\w-]{{0,40}}?{_TOKEN_NAME}\s+{_ARGUMENT}", _ANY_CASE),
    # Of a tokenizer, too, there are such names, but no such values.
    _rule("named token", rf"\b[A-Z][A-Z0-9_]{{0,40}}_TOKEN{_IS}(?P<x>(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{{8,}})"),
    _rule("named key or secret", rf"{_SECRET_NAME}{_EQUALS}{_VALUE}", _ANY_CASE),
    _rule("named key or secret", rf"--[\w-]{{0,40}}?{_SECRET_NAME}\s+{_ARGUMENT}", _ANY_CASE),
    _rule(
        "e-mail address", r"(?<![\w.+-])(?P<x>(?!git@)[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24})(?![\w@])"
    ),
    _rule("bucket", r"\b(?:s3[an]?|gs|gcs|abfss?|wasbs?|az|oss|cos|r2|hdfs|tos)://(?P<x>[^\s/'\",)]+)"),
    _rule("bucket", r"//(?:s3[\w.-]{0,30}\.amazonaws|storage\.googleapis)\.com/(?P<x>[a-z0-9][\w.-]{2,62})"),
    _rule("bucket", r"\barn:aws[\w-]{0,10}:s3:::(?P<x>[\w.-]+)"),
    _rule("cloud account", r"\barn:aws[\w-]{0,10}:[\w-]{0,30}:[\w-]{0,20}:(?P<x>\d{12})"),
    _rule("cloud account", r"\b(?P<x>\d{12})(?=\.dkr\.ecr\.)"),
    _rule("MAC address", rf"(?<![\w:])(?P<x>(?:{_HEX}{{2}}[:-]){{5}}{_HEX}{{2}})(?![\w:-])", _ANY_CASE),
    _rule("MAC address", rf"(?<![\w.])(?P<x>(?=[\d.]{{0,13}}[a-f]){_HEX}{{4}}\.{_HEX}{{4}}\.{_HEX}{{4}})(?![\w.])"),
    _rule("device id", rf"\b(?P<x>(?:GPU|MIG|NIC)-{_UUID})"),
    _rule("device id", rf"\b(?:gpu|device)?[ _-]?uuid{_IS}(?P<x>{_UUID})", _ANY_CASE),
    _rule(
        "serial number",
        r"\bserial(?:[ _-]?(?:number|no))?[\"']?\s{0,40}[:=]\s{0,3}[\"']?(?P<x>(?=\w*\d)\w{6,})",
        _ANY_CASE,
    ),
    _rule("network path", r"(?<![\w\\:])\\{2,4}(?P<x>[A-Za-z][\w.-]{2,62}\\{1,2}[\w.$-]{2,62})(?=\\)"),
    _rule(
        "home directory",
        r"(?:(?<![\w.~-])|(?<=\\[nrt]))(?P<x>(?:/[\w.-]+){0,3}?/(?:home|homes|Users|users|scratch|fsx)/[^\s/'\"\\,:;()\[\]{}<>]+)",
    ),
    _rule("home directory", r"(?P<x>\b[A-Za-z]:\\{1,2}Users\\{1,2}[^\s\\/'\",:;]+)"),
    _rule("home directory", r"(?<![\w./-])(?P<x>/root)(?![\w.-])"),
    _rule("home directory", r"(?<![\w./])(?P<x>~[a-z][\w-]+)(?=/)"),
    _rule("user name", r"\bwandb\.ai/(?P<x>[\w-]+)(?=/)"),
    _rule("user name", r"\bSLURM_JOB_ACCOUNT=(?P<x>[\w.-]+)"),
)

# Kinds that are no secrets: a name is private wherever it stands, and no name of a variable shows it.
PERSONAL: frozenset[str] = frozenset(
    {
        *("e-mail address", "bucket", "cloud account", "IPv4 address", "IPv6 address", "MAC address", "device id"),
        *("serial number", "home directory", "network path", "host", "user name"),
    }
)
# By kind; a number follows it, the same for the same text in all files of a bundle.
PLACEHOLDER: dict[str, str] = {
    kind: re.sub(r"[^A-Z0-9]+", "_", kind.replace("'s", "").upper())
    for kind in (*dict.fromkeys(rule.kind for rule in RULES), "IPv4 address", "IPv6 address", "host")
}
IS_PLACEHOLDER = re.compile(rf"(?:{'|'.join(PLACEHOLDER.values())})_\d+")

_HOST = r"(?P<x>[A-Za-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,8}|\d{1,6}(?:-\d{1,6}){0,6}-[A-Za-z][\w.-]{0,99})"
_NUMBERED_HOST = r"(?P<x>(?=[\w.-]{0,99}[\d-])[A-Za-z][\w-]{1,62}(?:\.[\w-]{1,63}){0,8})"
_LINES = re.MULTILINE

# Where a host is named; its name is then replaced wherever it stands.
HOSTS: tuple[re.Pattern[str], ...] = (
    re.compile(
        r"\b(?:master[_-]addr|(?:local[_-])?host[_-]?name|rdzv[_-]endpoint|submit_host|nodename|cluster[_ ]?name)"
        rf"{_IS}{_HOST}",
        _ANY_CASE,
    ),
    re.compile(rf"--(?:master[_-]addr|rdzv[_-]endpoint|hostname|nodelist|host)[=\s]\s*{_HOST}(?![\w=])"),
    re.compile(r"\bSLURM\w*(?:NODELIST|NODE_LIST|HOST|NODENAME)=(?P<x>[^\s,]+)"),
    re.compile(rf"\b(?:host|node|server|machine|endpoint|address|peer){_IS}{_NUMBERED_HOST}", _ANY_CASE),
    re.compile(r"^[^\S\n]*host[^\S\n]+:[^\S\n]+(?P<x>\S+)", _LINES),
    re.compile(r"\bhost (?P<x>[A-Za-z]\w{0,30}-[\w-]{0,30}\d[\w.-]{0,30})"),
    re.compile(
        rf"\b(?:on|from|at|to|of|by) (?:the )?(?:host|node|machine|server|worker node) {_NUMBERED_HOST}", _ANY_CASE
    ),
    re.compile(rf"(?<![\w.-]){_HOST}:\d+:\d+ \[\d+\] NCCL"),
    re.compile(rf"\[{_HOST}\]:\d{{2,5}}\b"),
    re.compile(rf"\b(?:tcp|gloo|nccl|ray|grpc|ssh|nfs)://(?:[^\s/@]+@)?{_HOST}"),
    re.compile(rf"\bsrun: error: {_HOST}: task"),
    re.compile(rf"\bslurmstepd: error: [^\n]*? ON {_HOST} CANCELLED"),
    re.compile(rf"\b[a-z_][\w.-]{{0,31}}@{_HOST}(?=:[~/]|\s+[~/]\S*[\])]?[$#%]|\][$#])"),
    re.compile(rf"\b(?:ssh|scp|rsync)\s[^\n]{{0,80}}?[\w.-]{{1,64}}@{_HOST}"),
    re.compile(r"\b[a-z][\w.-]{1,31}@(?P<x>(?!v\d)[A-Za-z]{2,20}-?\d{1,5})(?![\w.-])"),
    re.compile(rf"^{_HOST} slots=\d", _LINES),
    re.compile(rf"\bLinux {_HOST} \d+\.\d+\.\d+"),
    re.compile(rf"^[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} [\w.-]+(?:\[\d+\])?:", _LINES),
    re.compile(r"\bmachine\s+(?P<x>\S+)\s+login\s"),
    re.compile(rf" AAAA[A-Za-z0-9+/=]{{16,}} [\w.-]{{1,64}}@{_HOST}"),
)

_NAME = r"(?P<x>[A-Za-z][\w.-]{1,31})"

# Where a user is named; the name is then replaced wherever it stands.
USERS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"\b(?:\w+_)?(?:USER|USERNAME|LOGNAME|USERID){_IS}{_NAME}"),
    re.compile(rf"\b(?:user_?name|login_?name|(?:\w{{1,20}}_)?entity){_IS}{_NAME}", _ANY_CASE),
    re.compile(rf"--(?:[\w-]{{1,20}}-)?entity[=\s]\s*{_NAME}"),
    re.compile(rf"\b[Ll]ogged in as:? \S{{1,40}} \({_NAME}\)"),
    re.compile(rf"(?:/home|/homes|/Users|/users|/scratch|/fsx|:\\{{1,2}}Users\\{{1,2}})[/\\]?{_NAME}"),
    re.compile(rf"(?<![\w./])~{_NAME}(?=/)"),
    re.compile(rf"\b{_NAME}@(?!v\d)[A-Za-z]{{2,20}}-?\d{{1,5}}(?![\w.-])"),
    re.compile(rf"\b(?:user|UserId)={_NAME}"),
    re.compile(rf"^[^\S\n]*User(?:name)?:[^\S\n]+{_NAME}$", _LINES),
    re.compile(rf"\b[Ll]ogged in as:? {_NAME}"),
    re.compile(rf"\blogin {_NAME} password\b"),
    re.compile(rf"\b{_NAME}@[A-Za-z][\w.-]*(?=:[~/]|\s+[~/]\S*[\])]?[$#%]|\][$#])"),
    re.compile(rf"\b(?:ssh|scp|rsync)\s[^\n]{{0,80}}?\b{_NAME}@"),
    re.compile(rf" AAAA[A-Za-z0-9+/=]{{16,}} {_NAME}@"),
    re.compile(rf"\b[ug]id=\d+\({_NAME}\)"),
    re.compile(rf"^[dl-][rwxsStT-]{{9}}[.+@]? +\d+ {_NAME} ", _LINES),
    re.compile(rf"\bwandb\.ai/{_NAME}/"),
    re.compile(rf"\bsudo: +{_NAME} :"),
)

# Names that say nothing of anybody, and words that a log needs.
NOBODY = re.compile(
    r"root|ubuntu|users?|admin|administrator|runner|jovyan|nobody|ray|vscode|app|work|workers?|node|git|docker|centos"
    r"|debian|azureuser|ec2-user|shared|public|data|datasets|models?|torch|train|training|tests?|default|none|null|true"
    r"|false|str|string|local|main|python|conda|venv|miniconda3|anaconda3|cache|tmp|opt|home|projects?|code|src"
    r"|checkpoints|rank|master|host|localhost|cuda|gpu|cpu|nccl|gloo|self|with|the|and|for|from|name",
    re.IGNORECASE,
)
# Values that are no secrets: words, references to variables, and code.
NOT_SECRET = re.compile(
    r"(?:true|false|none|null|nil|str|\d{1,6}|<.*|\*+|x{3,}|\.{2,}.*|\$.*|%.*|your.*|required|optional|set|unset|missing"
    r"|(?:os|self|args|cfg|config|kwargs|settings|options|params|env)[.\[].*|[a-z_]+\(.*|\[redacted.*)",
    re.IGNORECASE,
)
PUBLIC_HOSTS = re.compile(
    r"(?:.*\.)?(?:github\.com|githubusercontent\.com|github\.io|huggingface\.co|hf\.co|pytorch\.org|pypi\.org|python\.org"
    r"|pythonhosted\.org|arxiv\.org|stackoverflow\.com|nvidia\.com|readthedocs\.io|wikipedia\.org|google\.com"
    r"|googleapis\.com|anaconda\.(?:com|org)|conda\.io|wandb\.ai|slack\.com|discord(?:app)?\.com|office\.com|ray\.io"
    r"|kernel\.org|gnu\.org|apache\.org|localhost|json-schema\.org|w3\.org|docker\.(?:io|com)|ghcr\.io|gcr\.io"
    r"|quay\.io|modelscope\.(?:cn|ai)|lightning\.ai|openai\.com|tensorflow\.org|numpy\.org)",
    re.IGNORECASE,
)
