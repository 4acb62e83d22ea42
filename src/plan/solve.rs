//! Picks one option of each class under a budget, with the smallest sum of errors.
//!
//! The multiple-choice knapsack problem, solved exactly: a Lagrange multiplier from the relaxed problem
//! (convex hulls, greedy) bounds every partial choice, and dynamic programming runs over the few options
//! that the bound leaves. Deterministic: ties go to the earlier option.

use std::cmp::Ordering;

/// One way to store something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Bits it takes.
    pub cost: u64,
    /// What it does to the model; smaller is better.
    pub error: f64,
}

/// What was picked.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Index of the option of each class.
    pub picks: Vec<usize>,
    /// Sum of costs.
    pub cost: u64,
    /// Sum of errors.
    pub error: f64,
    /// How far `error` can at most be above the best; 0 unless the search was cut short.
    pub gap: f64,
    /// A sum of errors that no choice is below: that of the relaxed problem.
    pub bound: f64,
}

/// States kept at a time. Real models need a few thousand; the limit bounds memory, not quality in
/// practice, and a cut is reported as [`Solution::gap`].
const MOST_STATES: usize = 200_000;

/// Picks the options with the smallest sum of errors among those whose costs sum to at most `budget`.
/// `None` if even the cheapest don't fit, or a class is empty.
pub fn solve(classes: &[Vec<Choice>], budget: u64) -> Option<Solution> {
    solve_until(classes, budget, &|| false)
}

/// The same, but once `cancelled` the search is cut short: what it has then is feasible, with its gap.
pub fn solve_until(classes: &[Vec<Choice>], budget: u64, cancelled: &dyn Fn() -> bool) -> Option<Solution> {
    solve_within(classes, budget, MOST_STATES, cancelled)
}

fn solve_within(
    classes: &[Vec<Choice>],
    budget: u64,
    most_states: usize,
    cancelled: &dyn Fn() -> bool,
) -> Option<Solution> {
    let classes: Vec<Class> = classes.iter().map(|c| Class::new(c)).collect::<Option<_>>()?;
    if classes.iter().map(|c| c.options[0].cost).sum::<u64>() > budget {
        return None;
    }
    let (multiplier, start) = relax(&classes, budget);
    let incumbent = fill(&classes, start, budget);
    let core = Core::new(&classes, multiplier, budget);
    let bound = core.bound();
    let (picks, gap) = core.improve(incumbent, most_states, cancelled);
    let (cost, error) = totals(&classes, &picks);
    let picks = classes.iter().zip(picks).map(|(class, i)| class.original[i]).collect();
    Some(Solution { picks, cost, error, gap, bound })
}

/// The choices on the lower convex hull of cost and error, the cheapest first.
pub(super) fn lower_hull(choices: &[Choice]) -> Vec<usize> {
    Class::new(choices).map_or(Vec::new(), |class| class.hull.iter().map(|&i| class.original[i]).collect())
}

/// A class without its dominated options: costs rise, errors fall.
struct Class {
    options: Vec<Choice>,
    original: Vec<usize>,
    /// Which of `options` are on the lower convex hull.
    hull: Vec<usize>,
}

impl Class {
    fn new(choices: &[Choice]) -> Option<Self> {
        let mut order: Vec<usize> = (0..choices.len()).collect();
        order.sort_by(|&a, &b| {
            (choices[a].cost.cmp(&choices[b].cost)).then(choices[a].error.total_cmp(&choices[b].error))
        });
        let mut original: Vec<usize> = Vec::new();
        for i in order {
            if original.last().is_none_or(|&last| choices[i].error < choices[last].error) {
                original.push(i);
            }
        }
        let options: Vec<Choice> = original.iter().map(|&i| choices[i]).collect();
        let mut hull: Vec<usize> = Vec::new();
        for i in 0..options.len() {
            while let [.., a, b] = hull[..] {
                if slope(options[a], options[b]) > slope(options[b], options[i]) {
                    break;
                }
                hull.pop();
            }
            hull.push(i);
        }
        (!options.is_empty()).then_some(Self { options, original, hull })
    }
}

/// Error saved a bit when going from `a` to the dearer `b`.
fn slope(a: Choice, b: Choice) -> f64 {
    (a.error - b.error) / (b.cost - a.cost) as f64
}

/// Takes the best steps along the hulls while they fit. Gives the slope of the first that doesn't, and the
/// picks reached.
fn relax(classes: &[Class], budget: u64) -> (f64, Vec<usize>) {
    let mut steps: Vec<(f64, usize, usize)> = Vec::new();
    for (c, class) in classes.iter().enumerate() {
        for (step, pair) in class.hull.windows(2).enumerate() {
            steps.push((slope(class.options[pair[0]], class.options[pair[1]]), c, step + 1));
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut picks = vec![0; classes.len()];
    let mut cost: u64 = classes.iter().map(|c| c.options[0].cost).sum();
    for (slope, c, step) in steps {
        let class = &classes[c];
        let (from, to) = (class.hull[step - 1], class.hull[step]);
        let dearer = class.options[to].cost - class.options[from].cost;
        if cost + dearer > budget {
            return (slope, picks);
        }
        cost += dearer;
        picks[c] = to;
    }
    (0.0, picks)
}

/// Spends what is left on the single exchanges that save most.
fn fill(classes: &[Class], mut picks: Vec<usize>, budget: u64) -> Vec<usize> {
    loop {
        let left = budget - totals(classes, &picks).0;
        let mut best: Option<(f64, usize, usize)> = None;
        for (c, class) in classes.iter().enumerate() {
            let now = class.options[picks[c]];
            let affordable =
                class.options[picks[c] + 1..].iter().take_while(|o| o.cost - now.cost <= left).count();
            if affordable > 0 {
                let saved = now.error - class.options[picks[c] + affordable].error;
                if best.is_none_or(|b| saved > b.0) {
                    best = Some((saved, c, picks[c] + affordable));
                }
            }
        }
        let Some((_, c, to)) = best else { return picks };
        picks[c] = to;
    }
}

fn totals(classes: &[Class], picks: &[usize]) -> (u64, f64) {
    let picked = classes.iter().zip(picks).map(|(c, &i)| c.options[i]);
    picked.fold((0, 0.0), |(cost, error), o| (cost + o.cost, error + o.error))
}

/// Exact search around the relaxed solution.
///
/// With multiplier m, every option has a penalty: how much `error + m · cost` is above the class's smallest.
/// The error of a complete choice is a constant plus its penalties plus m times the bits left unspent, so a
/// partial choice whose penalties reach those of the incumbent can be dropped.
struct Core<'a> {
    classes: &'a [Class],
    multiplier: f64,
    budget: u64,
    base: Vec<usize>,
}

#[derive(Clone, Copy)]
struct State {
    cost: i64,
    penalty: f64,
    /// Where in `trail` the last deviation from `base` stands.
    trail: u32,
}

const NO_TRAIL: u32 = u32::MAX;

impl<'a> Core<'a> {
    fn new(classes: &'a [Class], multiplier: f64, budget: u64) -> Self {
        let base = classes
            .iter()
            .map(|class| {
                let reduced = |i: usize| reduced(class.options[i], multiplier);
                (0..class.options.len()).fold(0, |best, i| if reduced(i) < reduced(best) { i } else { best })
            })
            .collect();
        Self { classes, multiplier, budget, base }
    }

    /// A sum of errors that no choice within the budget is below.
    fn bound(&self) -> f64 {
        let smallest =
            self.classes.iter().zip(&self.base).map(|(c, &i)| reduced(c.options[i], self.multiplier));
        smallest.sum::<f64>() - self.multiplier * self.budget as f64
    }

    /// The best picks, and how far they can be from the optimum.
    fn improve(
        &self,
        incumbent: Vec<usize>,
        most_states: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> (Vec<usize>, f64) {
        let excess = |picks: &[usize]| -> f64 {
            let slack = self.budget as i64 - totals(self.classes, picks).0 as i64;
            let penalties: f64 = picks.iter().enumerate().map(|(c, &i)| self.penalty(c, i)).sum();
            penalties + self.multiplier * slack as f64
        };
        let mut limit = excess(&incumbent);
        let base_cost = totals(self.classes, &self.base).0 as i64;
        let mut states = vec![State { cost: base_cost, penalty: 0.0, trail: NO_TRAIL }];
        let mut trail: Vec<(u32, u32, u32)> = Vec::new();
        let mut cut = false;
        // The most that the classes still to come can lower the cost by.
        let mut relief: Vec<i64> = vec![0; self.classes.len() + 1];
        for c in (0..self.classes.len()).rev() {
            let cheapest = (0..self.classes[c].options.len())
                .filter(|&i| self.penalty(c, i) < limit)
                .map(|i| self.dearer(c, i))
                .min();
            relief[c] = relief[c + 1] + cheapest.unwrap_or(0).min(0);
        }
        for c in 0..self.classes.len() {
            if cancelled() {
                cut = true;
                break;
            }
            let deviations: Vec<usize> = (0..self.classes[c].options.len())
                .filter(|&i| i != self.base[c] && self.penalty(c, i) < limit)
                .collect();
            if deviations.is_empty() {
                continue;
            }
            let mut next = states.clone();
            for state in &states {
                for &i in &deviations {
                    let penalty = state.penalty + self.penalty(c, i);
                    let cost = state.cost + self.dearer(c, i);
                    if penalty < limit && cost + relief[c + 1] <= self.budget as i64 {
                        trail.push((state.trail, c as u32, i as u32));
                        next.push(State { cost, penalty, trail: trail.len() as u32 - 1 });
                    }
                }
            }
            states = self.undominated(next);
            // A complete choice already: everything else stays at its base.
            for state in &states {
                let slack = self.budget as i64 - state.cost;
                if slack >= 0 {
                    limit = limit.min(state.penalty + self.multiplier * slack as f64 + f64::EPSILON * limit);
                }
            }
            if states.len() > most_states || trail.len() > 50 * most_states {
                cut = true;
                states.sort_by(|a, b| a.penalty.total_cmp(&b.penalty));
                states.truncate(most_states / 4);
            }
        }
        let best = states.iter().filter(|s| s.cost <= self.budget as i64).min_by(|a, b| {
            let total = |s: &State| s.penalty + self.multiplier * (self.budget as i64 - s.cost) as f64;
            total(a).total_cmp(&total(b))
        });
        let mut picks = self.base.clone();
        let mut at = best.map_or(NO_TRAIL, |s| s.trail);
        while at != NO_TRAIL {
            let (before, c, i) = trail[at as usize];
            picks[c as usize] = i as usize;
            at = before;
        }
        let better = best.is_some() && totals(self.classes, &picks).1 < totals(self.classes, &incumbent).1;
        let picks = if better { picks } else { incumbent };
        let gap = if cut { excess(&picks).max(0.0) } else { 0.0 };
        (picks, gap)
    }

    fn penalty(&self, c: usize, i: usize) -> f64 {
        let class = &self.classes[c];
        let of = |i: usize| reduced(class.options[i], self.multiplier);
        (of(i) - of(self.base[c])).max(0.0)
    }

    fn dearer(&self, c: usize, i: usize) -> i64 {
        let options = &self.classes[c].options;
        options[i].cost as i64 - options[self.base[c]].cost as i64
    }

    /// Drops states that cost at least as much as another without a smaller error.
    fn undominated(&self, mut states: Vec<State>) -> Vec<State> {
        let error = |s: &State| s.penalty - self.multiplier * s.cost as f64;
        states.sort_by(|a, b| a.cost.cmp(&b.cost).then(error(a).total_cmp(&error(b))));
        let mut smallest = f64::INFINITY;
        states.retain(|s| match error(s).partial_cmp(&smallest) {
            Some(Ordering::Less) => {
                smallest = error(s);
                true
            }
            _ => false,
        });
        states
    }
}

fn reduced(option: Choice, multiplier: f64) -> f64 {
    option.error + multiplier * option.cost as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn brute_force(classes: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let mut sums = vec![(0u64, 0.0f64)];
        for class in classes {
            sums = sums
                .iter()
                .flat_map(|&(cost, error)| class.iter().map(move |o| (cost + o.cost, error + o.error)))
                .filter(|s| s.0 <= budget)
                .collect();
        }
        sums.into_iter().map(|s| s.1).min_by(f64::total_cmp)
    }

    /// Dynamic programming over every budget up to the one given.
    fn exact(classes: &[Vec<Choice>], budget: u64) -> f64 {
        let mut best = vec![0.0; budget as usize + 1];
        for class in classes {
            let of = |b: u64| {
                let options = class.iter().filter(|o| o.cost <= b);
                options.map(|o| best[(b - o.cost) as usize] + o.error).fold(f64::INFINITY, f64::min)
            };
            best = (0..=budget).map(of).collect();
        }
        best[budget as usize]
    }

    fn classes() -> impl Strategy<Value = (Vec<Vec<Choice>>, u64)> {
        let option = (1u64..40, 0.0f64..1.0).prop_map(|(cost, error)| Choice { cost, error });
        (prop::collection::vec(prop::collection::vec(option, 1..6), 1..7), 0u64..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_best_of_all_choices_is_found((classes, budget) in classes()) {
            match (solve(&classes, budget), brute_force(&classes, budget)) {
                (None, None) => {}
                (Some(found), Some(best)) => {
                    prop_assert!((found.error - best).abs() < 1e-9, "found {} best {best}", found.error);
                    prop_assert!(found.cost <= budget);
                    let sum: f64 = classes.iter().zip(&found.picks).map(|(c, &i)| c[i].error).sum();
                    prop_assert!((sum - found.error).abs() < 1e-9);
                    prop_assert_eq!(found.gap, 0.0);
                }
                (found, best) => prop_assert!(false, "found {found:?}, best {best:?}"),
            }
        }

        /// Costs of real models: many classes with the same few sizes.
        #[test]
        fn many_classes_of_equal_sizes_are_solved_exactly(
            errors in prop::collection::vec(0.01f64..1.0, 60),
            share in 0.1f64..0.9,
        ) {
            let classes: Vec<Vec<Choice>> = errors
                .iter()
                .map(|e| [2u64, 3, 4, 5, 6, 8].map(|b| Choice { cost: b, error: e * 4f64.powi(-(b as i32)) }).to_vec())
                .collect();
            let budget = (60.0 * (2.0 + 6.0 * share)) as u64;
            let found = solve(&classes, budget).unwrap();
            let best = exact(&classes, budget);
            prop_assert_eq!(found.gap, 0.0);
            prop_assert!((found.error - best).abs() < 1e-9 * best);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Options of any shape, on the hull or off it, and more classes than all choices could be tried of.
        #[test]
        fn many_classes_of_any_options_are_solved_exactly(
            classes in prop::collection::vec(
                prop::collection::vec((1u64..60, 0.0f64..1.0), 1..9), 20..40,
            ),
            share in 0.0f64..1.0,
        ) {
            let classes: Vec<Vec<Choice>> = classes
                .into_iter()
                .map(|c| c.into_iter().map(|(cost, error)| Choice { cost, error }).collect())
                .collect();
            let cheapest = classes.iter().map(|c| c.iter().map(|o| o.cost).min().unwrap()).sum::<u64>();
            let dearest = classes.iter().map(|c| c.iter().map(|o| o.cost).max().unwrap()).sum::<u64>();
            let budget = cheapest + (share * (dearest - cheapest) as f64) as u64;
            let found = solve(&classes, budget).unwrap();
            let best = exact(&classes, budget);
            prop_assert!(found.cost <= budget);
            prop_assert_eq!(found.gap, 0.0);
            prop_assert!((found.error - best).abs() < 1e-9, "found {} best {best}", found.error);
        }

        /// A search that is cut short says how far off it can be, and is no further off.
        #[test]
        fn a_cut_reports_its_gap(
            classes in prop::collection::vec(prop::collection::vec((1u64..60, 0.0f64..1.0), 4..9), 20..30),
            most_states in 1usize..12,
        ) {
            let classes: Vec<Vec<Choice>> = classes
                .into_iter()
                .map(|c| c.into_iter().map(|(cost, error)| Choice { cost, error }).collect())
                .collect();
            let budget = classes.iter().map(|c| c.iter().map(|o| o.cost).sum::<u64>() / c.len() as u64).sum();
            let Some(found) = solve_within(&classes, budget, most_states, &|| false) else { return Ok(()) };
            let best = exact(&classes, budget);
            prop_assert!(found.cost <= budget);
            prop_assert!(found.error - best <= found.gap + 1e-9, "{} {best} {}", found.error, found.gap);
        }
    }

    #[test]
    fn a_cut_search_is_not_called_exact() {
        // Costs that hardly ever fit together exactly.
        let option =
            |c: u64, i: u64| Choice { cost: 1000 + 337 * i + 7 * c * i, error: 1.0 / (i + c + 1) as f64 };
        let classes: Vec<Vec<Choice>> = (0..30).map(|c| (0..6).map(|i| option(c, i)).collect()).collect();
        let budget = 52_345;
        assert_eq!(solve(&classes, budget).unwrap().gap, 0.0);
        assert!(solve_within(&classes, budget, 2, &|| false).unwrap().gap > 0.0);
        // Cancelled, it stops at once with what it has.
        let asked = std::cell::Cell::new(0);
        let cancelled = || asked.replace(asked.get() + 1) >= 1;
        let stopped = solve_until(&classes, budget, &cancelled).unwrap();
        assert_eq!(asked.get(), 2);
        assert!(stopped.gap > 0.0 && stopped.cost <= budget);
    }

    #[test]
    fn an_impossible_budget_has_no_solution() {
        assert_eq!(solve(&[vec![Choice { cost: 5, error: 1.0 }]], 4), None);
        assert_eq!(solve(&[vec![]], 4), None);
    }
}
