"""Secrets that are known by their form, wherever they stand: the patterns of those who give them out."""

from __future__ import annotations

from fsdp_doctor.bundle.private_kinds import SecretKind

# By kind, the whole secret; each begins where a word does.
SECRET_FORMS: dict[SecretKind, str] = {
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
}
