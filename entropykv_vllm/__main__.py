# SPDX-License-Identifier: Apache-2.0
"""`python -m entropykv_vllm` is the `entropykv` command."""

from entropykv_vllm.cli import main

raise SystemExit(main())
