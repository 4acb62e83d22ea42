//! Numbers of bytes as people type them.

/// A positive number of bytes: alone or with B, kB, MB, GB, TB (powers of 1000) or K, M, G, T, KiB, MiB, GiB, TiB
/// (powers of 1024, as memory is sold); a fraction is allowed, as in `7.5GiB`.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        other => return Err(format!("unknown unit {other:?}")),
    };
    let (whole, fraction) = digits.trim().split_once('.').unwrap_or((digits.trim(), "0"));
    let size = || {
        let whole = whole.parse::<u64>().ok()?.checked_mul(unit)?;
        let digits = u32::try_from(fraction.len()).ok()?;
        let part =
            u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit) / 10u128.checked_pow(digits)?;
        whole.checked_add(u64::try_from(part).ok()?)
    };
    size().filter(|size| *size > 0).ok_or_else(|| "expected a positive number, such as 5GB".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_units() {
        assert_eq!(parse("5GB"), Ok(5_000_000_000));
        assert_eq!(parse("64MiB"), Ok(64 << 20));
        assert_eq!(parse("123"), Ok(123));
        assert_eq!([parse("24G"), parse("24GiB")], [Ok(24 << 30), Ok(24 << 30)]);
        assert_eq!([parse("7.5GiB"), parse("0.25GB")], [Ok(15 << 29), Ok(250_000_000)]);
        for bad in ["", "0", "-1", "5XB", "99999999999999GB", "GB", ".", "1.", "1.-5G", "1.2.3G", "0.0"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
