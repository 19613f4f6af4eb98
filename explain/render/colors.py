"""Colour maps by name, and as numbers for those that pictures are drawn in by default."""

from __future__ import annotations

from typing import Any

import numpy as np

from explain._utils.errors import ExplainError, option, shown
from explain._utils.spelling import did_you_mean

HEAT = "plasma"  # perceptually uniform, readable with colour-vision deficiencies, and nowhere grey
INTENSITY = "inferno"  # likewise, from black
SIGNED = "RdBu_r"  # blue against, white nothing, red for


def colorize(values: np.ndarray[Any, Any], name: str = HEAT) -> np.ndarray[Any, Any]:
    """Return ``values`` ``(H, W)`` in [0, 1] as colours ``(H, W, 3)`` uint8, by any colour map of matplotlib.

    Raises:
        ExplainError: no colour map has that name.

    >>> colorize(np.array([[0.0, 1.0]]), "gray").tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    table = lookup_table(name)
    colors: np.ndarray[Any, Any] = table[np.clip(values * 256, 0, 255).astype(np.uint8)]
    return colors


def lookup_table(name: str) -> np.ndarray[Any, Any]:
    """Return the 256 colours of a colour map, ``(256, 3)`` uint8; those of the default ones are known by heart.

    Loading matplotlib for them would take longer than explaining a photo.
    """
    if not isinstance(name, str):
        raise ExplainError(
            f"{option('colormap')} must be the name of a colour map, got {shown(name)}; 'plasma' is usual"
        )
    if name in TABLES:
        return np.frombuffer(bytes.fromhex(TABLES[name]), np.uint8).reshape(256, 3)
    from matplotlib import colormaps

    if name not in colormaps:
        raise ExplainError(f"colormap {name!r} is unknown; {did_you_mean(name, list(colormaps))}")
    table: np.ndarray[Any, Any] = colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    return table


TABLES: dict[str, str] = {
    "plasma": (
        "0c078610078713068915068a18068b1b068c1d068d1f058e21058f2305902505912705922905932b05942d04942f0495310496"
        "3304973404983604983804993a049a3b039a3d039b3f039c40039c42039d44039e45039e47029f49029f4a02a04c02a14e02a1"
        "4f02a25101a25201a35401a35601a35701a45901a45a00a55c00a55e00a55f00a66100a66200a66400a76500a76700a76800a7"
        "6a00a76c00a86d00a86f00a87000a87200a87300a87500a87601a87801a87901a87b02a87c02a77e03a77f03a78104a78204a7"
        "8405a68506a68607a68807a58908a58b09a48c0aa48e0ca48f0da3900ea3920fa29310a19511a19612a09713a099149f9a159e"
        "9b179e9d189d9e199c9f1a9ba01b9ba21c9aa31d99a41e98a51f97a72197a82296a92395aa2494ac2593ad2692ae2791af2890"
        "b02a8fb12b8fb22c8eb42d8db52e8cb62f8bb7308ab83289b93388ba3487bb3586bc3685bd3784be3883bf3982c03b81c13c80"
        "c23d80c33e7fc43f7ec5407dc6417cc7427bc8447ac94579ca4678cb4777cc4876cd4975ce4a75cf4b74d04d73d14e72d14f71"
        "d25070d3516fd4526ed5536dd6556dd7566cd7576bd8586ad95969da5a68db5b67dc5d66dc5e66dd5f65de6064df6163df6262"
        "e06461e16560e26660e3675fe3685ee46a5de56b5ce56c5be66d5ae76e5ae87059e87158e97257ea7356ea7455eb7654ec7754"
        "ec7853ed7952ed7b51ee7c50ef7d4fef7e4ef0804df0814df1824cf2844bf2854af38649f38748f48947f48a47f58b46f58d45"
        "f68e44f68f43f69142f79241f79341f89540f8963ff8983ef9993df99a3cfa9c3bfa9d3afa9f3afaa039fba238fba337fba436"
        "fca635fca735fca934fcaa33fcac32fcad31fdaf31fdb030fdb22ffdb32efdb52dfdb62dfdb82cfdb92bfdbb2bfdbc2afdbe29"
        "fdc029fdc128fdc328fdc427fdc626fcc726fcc926fccb25fccc25fcce25fbd024fbd124fbd324fad524fad624fad824f9d924"
        "f9db24f8dd24f8df24f7e024f7e225f6e425f6e525f5e726f5e926f4ea26f3ec26f3ee26f2f026f2f126f1f326f0f525f0f623"
        "eff821"
    ),
    "inferno": (
        "00000300000400000601000701010901010b02010e02021003021204031404031605041806041b07051d08061f0906210a0723"
        "0b07260d08280e082a0f092d10092f120a32130a34140b36160b39170b3b190b3e1a0b401c0c431d0c451f0c47200c4a220b4c"
        "240b4e260b50270b52290b542b0a562d0a582e0a5a300a5c32095d34095f3509603709613909623b09643c09653e0966400966"
        "410967430a68450a69460a69480b6a4a0b6a4b0c6b4d0c6b4f0d6c500d6c520e6c530e6d550f6d570f6d58106d5a116d5b116e"
        "5d126e5f126e60136e62146e63146e65156e66156e68166e6a176e6b176e6d186e6e186e70196e72196d731a6d751b6d761b6d"
        "781c6d7a1c6d7b1d6c7d1d6c7e1e6c801f6b811f6b83206b85206a86216a88216a8922698b22698d23698e2468902468912567"
        "9325679526669626669827659928649b28649c29639e2963a02a62a12b61a32b61a42c60a62c5fa72d5fa92e5eab2e5dac2f5c"
        "ae305baf315bb1315ab23259b43358b53357b73456b83556ba3655bb3754bd3753be3852bf3951c13a50c23b4fc43c4ec53d4d"
        "c73e4cc83e4bc93f4acb4049cc4148cd4247cf4446d04544d14643d24742d44841d54940d64a3fd74b3ed94d3dda4e3bdb4f3a"
        "dc5039dd5238de5337df5436e05634e25733e35832e45a31e55b30e65c2ee65e2de75f2ce8612be9622aea6428eb6527ec6726"
        "ed6825ed6a23ee6c22ef6d21f06f1ff0701ef1721df2741cf2751af37719f37918f47a16f57c15f57e14f68012f68111f78310"
        "f7850ef8870df8880cf88a0bf98c09f98e08f99008fa9107fa9306fa9506fa9706fb9906fb9b06fb9d06fb9e07fba007fba208"
        "fba40afba60bfba80dfbaa0efbac10fbae12fbb014fbb116fbb318fbb51afbb71cfbb91efabb21fabd23fabf25fac128f9c32a"
        "f9c52cf9c72ff8c931f8cb34f8cd37f7cf3af7d13cf6d33ff6d542f5d745f5d948f4db4bf4dc4ff3de52f3e056f3e259f2e45d"
        "f2e660f1e864f1e968f1eb6cf1ed70f1ee74f1f079f1f27df2f381f2f485f3f689f4f78df5f891f6fa95f7fb99f9fc9dfafda0"
        "fcfea4"
    ),
    "RdBu_r": (
        "05306106326307346608366909386c0a3a6f0b3c720c3e750d40780e437b0f457e114781124984134b87144d8a154f8d165190"
        "1754931856951958981a5a9b1c5c9e1d5ea11e60a41f62a72064aa2166ac2368ad246aae256caf276db0286fb02971b12b73b2"
        "2c75b32d76b42f78b5307ab6317cb7337db8347fb93581b93783ba3884bb3986bc3b88bd3c8abe3d8bbf3f8dc0408fc14191c2"
        "4393c34694c44996c54c98c64f9ac7529cc8559ec958a0ca5ba2cb5ea4cc61a6cd65a8ce68aacf6bacd06eaed171b0d274b2d3"
        "77b4d57ab6d67db8d780bad884bcd987beda8ac0db8dc2dc90c4dd93c5de95c6df98c8df9ac9e09dcae19fcbe1a2cde2a4cee3"
        "a7cfe4a9d0e4abd2e5aed3e6b0d4e6b3d5e7b5d7e8b8d8e8bad9e9bddaeabfdcebc2ddebc4deecc7dfedc9e1edcce2eecee3ef"
        "d1e5f0d2e5f0d3e6f0d5e7f0d6e7f1d8e8f1d9e9f1dbe9f1dceaf2deebf2dfecf2e1ecf3e2edf3e4eef3e5eef3e7eff4e8f0f4"
        "eaf1f4ebf1f4edf2f5eef3f5f0f3f5f1f4f6f3f5f6f4f5f6f6f6f6f7f6f6f7f5f4f7f4f2f7f3f0f8f2eef8f0ecf8efeaf8eee8"
        "f9ede7f9ece5f9ebe3f9eae1f9e9dffae8ddfae7dbfae5d9fae4d7fbe3d6fbe2d4fbe1d2fbe0d0fcdfcefcdeccfcddcafcdcc8"
        "fddbc7fcd8c4fcd6c1fbd4befbd2bcfbd0b9faceb6faccb4facab1f9c7aef9c5abf9c3a9f8c1a6f8bfa3f8bda1f7bb9ef7b99b"
        "f7b799f6b496f6b293f5b090f5ae8ef5ac8bf4aa88f4a886f4a683f3a380f2a07ef19e7cef9b7aee9878ed9676ec9374eb9072"
        "ea8e70e88b6ee7886ce6856ae58368e48065e27d63e17b61e0785fdf755dde725bdd7059db6d57da6a55d96853d86551d7624f"
        "d6604dd45d4bd35a4ad15749d05447ce5146cd4f45cc4c43ca4942c94641c7433fc6403ec53e3cc33b3bc2383ac03538bf3237"
        "be3036bc2d34bb2a33b92732b82431b6212fb51f2eb41c2db2192bb0172aad162aaa1529a71429a41328a112289e11279b1027"
        "991027960f26930e26900d258d0c258a0b24870a248409238108237e07227b06227805217504217203206f02206c011f69001f"
        "67001f"
    ),
}
