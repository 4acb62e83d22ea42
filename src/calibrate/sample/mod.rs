//! The text that models are calibrated on where none is named; `README.md` says what it is made of.

/// The ingredients.
const INGREDIENTS: [&str; 6] = [
    include_str!("encyclopedia.txt"),
    include_str!("prose.txt"),
    include_str!("chat.txt"),
    include_str!("code.txt"),
    include_str!("languages.txt"),
    include_str!("older.txt"),
];

/// Bytes of a piece at least: some paragraphs.
const PIECE: usize = 2000;

/// All ingredients, mixed piece by piece, so that any first part has about the same share of each.
pub(crate) fn text() -> String {
    let mut pieces: Vec<(f64, &str)> = Vec::new();
    for ingredient in INGREDIENTS {
        let mut start = 0;
        for (end, _) in ingredient.match_indices("\n\n") {
            if end - start >= PIECE {
                pieces.push(((start + end) as f64 / ingredient.len() as f64, &ingredient[start..end]));
                start = end;
            }
        }
        pieces.push(((start + ingredient.len()) as f64 / ingredient.len() as f64, &ingredient[start..]));
    }
    // Stable: of equals the ingredient that is named first.
    pieces.sort_by(|a, b| a.0.total_cmp(&b.0));
    pieces.iter().flat_map(|(_, piece)| [piece.trim(), "\n\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_part_has_its_share_of_each_ingredient() {
        let text = text();
        let total: usize = INGREDIENTS.iter().map(|ingredient| ingredient.len()).sum();
        assert!(text.len().abs_diff(total) < total / 50);
        let mut end = text.len() / 4;
        while !text.is_char_boundary(end) {
            end += 1;
        }
        for ingredient in INGREDIENTS {
            // Its pieces are found by their beginnings.
            let mut found = 0;
            for (start, _) in ingredient.match_indices("\n\n").step_by(5) {
                let line: String = ingredient[start + 2..].chars().take(40).collect();
                found += usize::from(line.len() > 30 && text[..end].contains(&line));
            }
            let all = ingredient.match_indices("\n\n").step_by(5).count();
            assert!((all / 12..=all / 2).contains(&found), "{found} of {all}: {}", &ingredient[..40]);
        }
    }
}
