"""``fsdp-doctor rollout``: a rollout engine starts on a device beside a trainer's worker (verl issue 4229).

rollout_request  what is asked for
stand_ins        the trainer's worker and the engine, each in a process of its own
beside           starts them one after the other, and gathers what each holds
remedies         what would free how much, and whether the engine would start then
rollout_text     the two ledgers side by side, the refusal and the remedies
"""
